"""Tests of a prompt's keys. ``engines/vllm/tests/engine`` compares the keys with vLLM's own."""

import hashlib
import pickle
from typing import Any

import pytest

from kvtier_sdk import ConfigError, make_offload_key
from kvtier_vllm.block_hashes import chunk_keys

SEED = b"\x11" * 32
FACTS: dict[str, Any] = {
    "hash_algorithm": "sha256",
    "hash_seed": SEED.hex(),
    "tokens_per_hash": 4,
    "blocks_per_chunk": 2,
    "groups": [{"tokens_per_block": 4}, {"tokens_per_block": 8}],
}


def hashed(parent: bytes, *tokens: int) -> bytes:
    return hashlib.sha256(pickle.dumps((parent, tokens, None), protocol=5)).digest()


def test_a_chunk_has_the_hash_of_its_last_block_and_its_group() -> None:
    first = hashed(SEED, 0, 1, 2, 3)
    second = hashed(first, 4, 5, 6, 7)
    fourth = hashed(hashed(second, 8, 9, 10, 11), 12, 13, 14, 15)
    small, large = chunk_keys(range(17), FACTS)
    assert small == [make_offload_key(second, 0), make_offload_key(fourth, 0)]
    assert large == [make_offload_key(fourth, 1)]


def test_only_whole_chunks_have_a_key() -> None:
    assert chunk_keys(range(7), FACTS) == [[], []]


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"model": "llama"}, "it has no fact 'hash_algorithm'"),
        ({**FACTS, "hash_algorithm": "md5"}, "'md5', which is not known"),
        ({**FACTS, "hash_seed": "no hex"}, "not those of a vLLM engine"),
        ({**FACTS, "groups": 3}, "not those of a vLLM engine"),
    ],
)
def test_facts_that_do_not_do_are_named(facts: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        chunk_keys(range(16), facts)
