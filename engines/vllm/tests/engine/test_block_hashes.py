"""``kvtier tier explain`` computes the same keys as vLLM."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens

    from kvtier_sdk import make_offload_key
    from kvtier_vllm.block_hashes import chunk_keys

SEED = bytes(range(32))


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_keys_are_vllms(algorithm: str) -> None:
    tokens = list(range(7, 71))
    function = get_hash_fn_by_name(algorithm)
    parent, hashes = SEED, []
    for start in range(0, 64, 16):
        parent = hash_block_tokens(function, parent, tokens[start : start + 16])
        hashes.append(parent)
    facts = {
        "hash_algorithm": algorithm,
        "hash_seed": SEED.hex(),
        "tokens_per_hash": 16,
        "blocks_per_chunk": 2,
        "groups": [{"tokens_per_block": 16}],
    }
    assert chunk_keys(tokens, facts) == [[make_offload_key(hashes[n], 0) for n in (1, 3)]]
