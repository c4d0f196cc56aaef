"""Checks that run a tier as an engine does, in a runner and with a pool's slots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.opening import BlockingTier
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.testing.conformance.probe import REQUEST, content_of
from kvtier_sdk.testing.conformance.rules import Breach, CheckSkipped, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Medium, OffloadKey

_CHUNKS = 3
_SLOTS = 2 * _CHUNKS
_DEADLINES = ("lookup_deadline_s", "load_deadline_s", "store_deadline_s")
_Use = Callable[[TierSubject, HostPool, BlockingTier], Awaitable[None]]
_BUILT = "A tier is built from its options alone, in the engine's process or in a separate one."


@check(says=_BUILT)
async def check_it_runs_in_a_thread(subject: TierSubject) -> None:
    """Chunks travel from a pool's slots to the tier and back, with the tier in a thread."""
    if subject.tier_class.needs_process:
        raise CheckSkipped("the tier needs a process of its own")
    await _with_runner(subject, "thread", _move_chunks)


@check(says=_BUILT)
async def check_it_runs_in_a_process(subject: TierSubject) -> None:
    """Chunks travel from a pool's slots to the tier and back, with the tier in a child process."""
    await _with_runner(subject, "process", _move_chunks)


@check(
    Medium.STORAGE,
    says="Except on Medium.CPU, each instance finds all chunks.",
)
async def check_processes_share_a_place(subject: TierSubject) -> None:
    """Processes whose tiers share a place find each other's chunks."""
    await _with_runner(subject, "process", _share_chunks)


async def _share_chunks(subject: TierSubject, pool: HostPool, tier: BlockingTier) -> None:
    namespace = subject.spec.namespace_of(subject.namespace, subject.chunk_bytes)
    async with subject.opened(namespace=namespace) as probe:
        if not all(await probe.lookup(await _store_chunks(subject, pool, tier))):
            raise Breach("lookup does not find a chunk that another process has just stored")
        ours = await probe.put(subject.new_keys(_CHUNKS))
        if ours and set(await _end_of(tier, tier.client.lookup(ours, REQUEST))) != {Verdict.OK}:
            raise Breach("another process does not find a chunk that was stored in this one")


async def _with_runner(subject: TierSubject, kind: str, use: _Use) -> None:
    options = {"runner": kind, **dict.fromkeys(_DEADLINES, subject.timeout_s)}
    runner = subject.spec.runner.model_copy(update=options)
    spec = replace(subject.spec, runner=runner).needed()
    with closing(HostPool.create(PoolLayout(_SLOTS, subject.chunk_bytes))) as pool:
        tier = BlockingTier.make(spec, pool, subject.namespace, clock=subject.clock)
        try:
            await run_blocking(tier.client.open)
            try:
                await use(subject, pool, tier)
            finally:
                await run_blocking(tier.client.close, subject.timeout_s)
        except KVTierError as error:
            raise Breach(f"with runner {kind!r}: {type(error).__name__}: {error}") from error


async def _end_of(tier: BlockingTier, job: Job | None) -> list[Verdict]:
    return (await run_blocking(tier.result_of, job)).verdicts


async def _store_chunks(
    subject: TierSubject, pool: HostPool, tier: BlockingTier
) -> list[OffloadKey]:
    """Store new chunks; return their keys, or an empty list if the tier lacks room."""
    keys = subject.new_keys(_CHUNKS)
    for slot, key in enumerate(keys):
        pool.view(slot)[:] = content_of(key, 0, subject.chunk_bytes)
    stored = await _end_of(tier, tier.client.store(keys, range(_CHUNKS), REQUEST, whole=True))
    if not subject.keeps_chunks and set(stored) == {Verdict.CAPACITY}:
        return []
    if set(stored) != {Verdict.OK}:
        raise Breach(f"storing {_CHUNKS} chunks gave {[verdict.value for verdict in stored]}")
    return keys


async def _move_chunks(subject: TierSubject, pool: HostPool, tier: BlockingTier) -> None:
    keys = await _store_chunks(subject, pool, tier)
    if not keys:
        return
    contents = [content_of(key, 0, subject.chunk_bytes) for key in keys]
    found = await _end_of(tier, tier.client.lookup(keys, REQUEST))
    if set(found) != {Verdict.OK}:
        raise Breach(f"looking up the same chunks gave {[verdict.value for verdict in found]}")
    loaded = await _end_of(
        tier, tier.client.load(keys, range(_CHUNKS, _SLOTS), REQUEST, whole=True)
    )
    for slot, content, verdict in zip(range(_CHUNKS, _SLOTS), contents, loaded, strict=True):
        if verdict is not Verdict.OK:
            raise Breach(f"loading the same chunks gave {[verdict.value for verdict in loaded]}")
        if bytes(pool.view(slot)[: subject.chunk_bytes]) != content:
            raise Breach("a loaded chunk holds other bytes than the stored one")
    absent = await _end_of(tier, tier.client.load(subject.new_keys(1), [0], REQUEST))
    if absent != [Verdict.NOT_FOUND]:
        raise Breach(f"loading a chunk that was never stored gave {absent[0].value}")
