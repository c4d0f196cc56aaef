"""Checks that use a tier as an engine does: through a runner, with the slots of a pool."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.runner.factory import make_runner
from kvtier_sdk.runner.jobs import Job, JobResult, Operation, Verdict
from kvtier_sdk.testing.conformance.probe import REQUEST, content_of
from kvtier_sdk.testing.conformance.rules import Breach, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import OffloadKey

_CHUNKS = 3
_SLOTS = 2 * _CHUNKS
_DEADLINES = ("lookup_deadline_s", "load_deadline_s", "store_deadline_s")
_BUILT = "A tier is built from its options alone, in this process or in one of its own."


@check(says=_BUILT)
async def check_it_runs_in_a_thread(subject: TierSubject) -> None:
    """Chunks travel from a pool's slots to the tier and back, with the tier in a thread."""
    await _check_runner(subject, "thread")


@check(says=_BUILT)
async def check_it_runs_in_a_process(subject: TierSubject) -> None:
    """Chunks travel from a pool's slots to the tier and back, with the tier in a child process."""
    await _check_runner(subject, "process")


class _Engine:
    """An engine that hands jobs to a runner and waits for their results."""

    def __init__(self, subject: TierSubject, runner: TierRunner) -> None:
        self._subject = subject
        self._runner = runner
        self._ids = itertools.count()

    async def do(
        self, operation: Operation, keys: Sequence[OffloadKey], slots: Sequence[int] = ()
    ) -> list[Verdict]:
        clock, timeout_s = self._subject.clock, self._subject.timeout_s
        end_s = clock.now_s() + 2 * timeout_s
        number = next(self._ids)
        deadline_s = clock.now_s() + timeout_s
        self._runner.submit([Job(number, operation, keys, slots, REQUEST, deadline_s)])
        while clock.now_s() < end_s:
            for report in self._runner.poll():
                if isinstance(report, JobResult) and report.job_id == number:
                    return report.verdicts
            await clock.sleep(0.002)
        raise Breach(f"a {operation.value} job of the runner never ended")


async def _check_runner(subject: TierSubject, kind: str) -> None:
    options = dict.fromkeys(_DEADLINES, subject.timeout_s)
    spec = replace(
        subject.spec, runner=subject.spec.runner.model_copy(update={"runner": kind, **options})
    )
    pool = HostPool.create(PoolLayout(_SLOTS, subject.chunk_bytes))
    try:
        runner = make_runner(
            spec,
            pool,
            namespace=subject.namespace,
            clock=subject.clock,
            notify=None,
            verify=True,
        )
        await run_blocking(runner.start)
        try:
            await _move_chunks(subject, pool, _Engine(subject, runner))
        finally:
            await run_blocking(runner.close, subject.timeout_s)
    except KVTierError as error:
        raise Breach(f"with runner {kind!r}: {type(error).__name__}: {error}") from error
    finally:
        pool.close()


async def _move_chunks(subject: TierSubject, pool: HostPool, engine: _Engine) -> None:
    keys = subject.new_keys(_CHUNKS)
    contents = [content_of(key, 0, subject.chunk_bytes) for key in keys]
    for slot, content in enumerate(contents):
        pool.view(slot)[:] = content
    stored = await engine.do(Operation.STORE, keys, range(_CHUNKS))
    if not subject.keeps_chunks and set(stored) == {Verdict.CAPACITY}:
        return
    if set(stored) != {Verdict.OK}:
        raise Breach(f"storing {_CHUNKS} chunks gave {[verdict.value for verdict in stored]}")
    found = await engine.do(Operation.LOOKUP, keys)
    if set(found) != {Verdict.OK}:
        raise Breach(f"looking up the same chunks gave {[verdict.value for verdict in found]}")
    loaded = await engine.do(Operation.LOAD, keys, range(_CHUNKS, _SLOTS))
    for slot, content, verdict in zip(range(_CHUNKS, _SLOTS), contents, loaded, strict=True):
        if verdict is not Verdict.OK:
            raise Breach(f"loading the same chunks gave {[verdict.value for verdict in loaded]}")
        if bytes(pool.view(slot)[: subject.chunk_bytes]) != content:
            raise Breach("a loaded chunk holds other bytes than the stored one")
    absent = await engine.do(Operation.LOAD, subject.new_keys(1), [0])
    if absent != [Verdict.NOT_FOUND]:
        raise Breach(f"loading a chunk that was never stored gave {absent[0].value}")
