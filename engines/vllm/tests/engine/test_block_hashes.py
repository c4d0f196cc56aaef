"""``kvtier tier explain`` computes the same keys as vLLM."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, hash_block_tokens
    from vllm.v1.request import Request

    from kvtier_sdk import make_offload_key
    from kvtier_vllm.block_hashes import chunk_keys

SEED = bytes(range(32))


@pytest.mark.parametrize("salt", [None, "acme-7c1f"])
@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_the_keys_are_vllms(algorithm: str, salt: str | None) -> None:
    tokens = list(range(7, 71))
    function = get_hash_fn_by_name(algorithm)
    parent, hashes = SEED, []
    request = Request("r", tokens, SamplingParams(max_tokens=1), None, cache_salt=salt)
    for start in range(0, 64, 16):
        extra, _ = generate_block_hash_extra_keys(request, start, start + 16, 0)
        parent = hash_block_tokens(function, parent, tokens[start : start + 16], extra)
        hashes.append(parent)
    facts = {
        "hash_algorithm": algorithm,
        "hash_seed": SEED.hex(),
        "tokens_per_hash": 16,
        "blocks_per_chunk": 2,
        "groups": [{"tokens_per_block": 16}],
    }
    assert chunk_keys(tokens, facts, salt) == [[make_offload_key(hashes[n], 0) for n in (1, 3)]]
