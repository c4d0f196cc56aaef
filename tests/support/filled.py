"""Stores chunks in a tier as an engine does, and reads them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np

from kvtier_sdk import (
    HostPool,
    Namespace,
    OffloadKey,
    RequestContext,
    SystemClock,
    TierSpec,
    Verdict,
    make_offload_key,
)
from kvtier_sdk.opening import BlockingTier
from support.live import content

CHUNK_BYTES = 4096
_REQUEST = RequestContext("an engine")
_AT_ONCE = 500


def keys_from(first: int, count: int) -> list[OffloadKey]:
    return [make_offload_key(number.to_bytes(32, "big")) for number in range(first, first + count)]


def floats(key: OffloadKey, chunk_bytes: int) -> bytes:
    """Return a compressible chunk of bfloat16 numbers, distributed as in a KV cache."""
    numbers = np.random.default_rng(list(key)).standard_normal(chunk_bytes // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@contextmanager
def an_engine(
    url: str, namespace: Namespace, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[BlockingTier, HostPool]]:
    deadlines = dict.fromkeys(("lookup_deadline", "load_deadline", "store_deadline"), "60s")
    spec = TierSpec.from_url(url, runner="thread", **deadlines)
    with closing(HostPool(_AT_ONCE, chunk_bytes)) as pool:
        tier = BlockingTier.make(spec, pool, namespace, clock=SystemClock())
        with closing(tier.client):
            tier.client.open()
            yield tier, pool


def fill(
    url: str,
    namespace: Namespace,
    keys: Sequence[OffloadKey],
    content: Callable[[OffloadKey, int], bytes] = content,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    with an_engine(url, namespace, chunk_bytes) as (tier, pool):
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            for slot, key in enumerate(part):
                pool.view(slot)[:] = content(key, pool.chunk_bytes)
            job = tier.client.store(part, range(len(part)), _REQUEST, whole=True)
            assert set(tier.result_of(job).verdicts) == {Verdict.OK}


def contents(
    url: str, namespace: Namespace, keys: Sequence[OffloadKey], chunk_bytes: int = CHUNK_BYTES
) -> list[bytes | None]:
    found: list[bytes | None] = []
    with an_engine(url, namespace, chunk_bytes) as (tier, pool):
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            job = tier.client.load(part, range(len(part)), _REQUEST, whole=True)
            found += [
                bytes(pool.view(slot)) if verdict is Verdict.OK else None
                for slot, verdict in enumerate(tier.result_of(job).verdicts)
            ]
    return found
