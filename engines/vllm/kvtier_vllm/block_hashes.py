"""Computes a prompt's chunk keys as vLLM does, without importing vLLM."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from xxhash import xxh3_128_digest

from kvtier_sdk import ConfigError, OffloadKey, make_offload_key

#: The namespace's facts that determine the keys for given tokens.
_FACTS = ("hash_algorithm", "hash_seed", "tokens_per_hash", "blocks_per_chunk", "groups")


def chunk_keys(
    tokens: Sequence[int], facts: Mapping[str, Any], salt: str | None = None
) -> list[list[OffloadKey]]:
    """Compute the keys of a prompt's full chunks, one list for each KV-cache group.

    vLLM's hashes also cover adapters, images and audio, which are not supported here.
    """
    if missing := [name for name in _FACTS if name not in facts]:
        raise ConfigError(
            f"the namespace does not say how vLLM's keys follow from tokens: it has no fact "
            f"{missing[0]!r}"
        )
    try:
        hashes = _block_hashes(
            tokens,
            facts["tokens_per_hash"],
            _hash_function(facts["hash_algorithm"]),
            bytes.fromhex(facts["hash_seed"]),
            salt,
        )
        return [
            _keys_of_group(hashes, index, group["tokens_per_block"], facts)
            for index, group in enumerate(facts["groups"])
        ]
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"the namespace's facts are not those of a vLLM engine: {error}"
        ) from error


def _keys_of_group(
    hashes: Sequence[bytes], index: int, tokens_per_block: int, facts: Mapping[str, Any]
) -> list[OffloadKey]:
    # A chunk's key contains the hash of the chunk's last block.
    step = tokens_per_block * facts["blocks_per_chunk"] // facts["tokens_per_hash"]
    return [make_offload_key(one, index) for one in hashes[step - 1 :: step]]


def _block_hashes(
    tokens: Sequence[int],
    size: int,
    function: Callable[[Any], bytes],
    seed: bytes,
    salt: str | None,
) -> list[bytes]:
    hashes = []
    parent = seed
    # vLLM adds the salt only to the first block, whose hash enters the hashes of all later blocks.
    extra = (("cache_salt", salt),) if salt else None
    for start in range(0, len(tokens) - size + 1, size):
        parent = function((parent, tuple(tokens[start : start + size]), extra))
        hashes.append(parent)
        extra = None
    return hashes


def _hash_function(name: str) -> Callable[[Any], bytes]:
    digest = {"sha256": _sha256, "xxhash": xxh3_128_digest}.get(name.removesuffix("_cbor"))
    if digest is None:
        raise ConfigError(f"the fact 'hash_algorithm' is {name!r}, which is not known here")
    write = _cbor() if name.endswith("_cbor") else _pickled
    return lambda value: digest(write(value))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _cbor() -> Callable[[Any], bytes]:
    try:
        cbor2 = import_module("cbor2")
    except ModuleNotFoundError:
        raise ConfigError(
            "the keys are hashes of CBOR, which needs cbor2: pip install cbor2"
        ) from None
    return lambda value: bytes(cbor2.dumps(value, canonical=True))
