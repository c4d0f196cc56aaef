"""Chunks in a tier, as an engine leaves them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from kvtier_sdk import (
    HostPool,
    Namespace,
    OffloadKey,
    RequestContext,
    TierSpec,
    Verdict,
    make_offload_key,
)
from kvtier_sdk.engine import TierClient, TierListener, open_tier
from support.live import content

CHUNK_BYTES = 4096
_REQUEST = RequestContext("an engine")
_PATIENCE_S = 60.0
_AT_ONCE = 500


def keys_from(first: int, count: int) -> list[OffloadKey]:
    """Return the keys of chunks with successive numbers."""
    return [make_offload_key(number.to_bytes(32, "big")) for number in range(first, first + count)]


@contextmanager
def an_engine(
    url: str, namespace: Namespace, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[TierClient, HostPool]]:
    """Open a tier as an engine does, in a thread, and with long deadlines."""
    spec = TierSpec.from_url(url)
    deadlines = ("lookup_deadline_s", "load_deadline_s", "store_deadline_s")
    options = {"runner": "thread", **dict.fromkeys(deadlines, _PATIENCE_S)}
    spec = replace(spec, runner=spec.runner.model_copy(update=options))
    pool = HostPool(_AT_ONCE, chunk_bytes)
    try:
        with open_tier(spec, pool, namespace, TierListener()) as client:
            yield client, pool
    finally:
        pool.close()


def wait_for(client: TierClient) -> None:
    """Hand over the collected jobs, and wait for their end."""
    client.flush()
    while client.has_work:
        client.poll()


def fill(url: str, namespace: Namespace, keys: Sequence[OffloadKey]) -> None:
    """Store chunks, each filled with its key over and over."""
    with an_engine(url, namespace) as (client, pool):
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            for slot, key in enumerate(part):
                pool.view(slot)[:] = content(key, pool.chunk_bytes)
            job = client.store(part, range(len(part)), _REQUEST, whole=True)
            wait_for(client)
            assert job is not None
            assert job.result is not None
            assert set(job.result.verdicts) == {Verdict.OK}, job.result


def contents(url: str, namespace: Namespace, keys: Sequence[OffloadKey]) -> list[bytes | None]:
    """Load chunks, and return their contents; ``None`` for a miss."""
    found: list[bytes | None] = []
    with an_engine(url, namespace) as (client, pool):
        for start in range(0, len(keys), _AT_ONCE):
            part = keys[start : start + _AT_ONCE]
            job = client.load(list(part), list(range(len(part))), _REQUEST, whole=True, tag=part)
            wait_for(client)
            assert job is not None
            assert job.result is not None
            found += [
                bytes(pool.view(slot)) if verdict is Verdict.OK else None
                for slot, verdict in enumerate(job.result.verdicts)
            ]
    return found
