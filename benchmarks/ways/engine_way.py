"""kvtier's whole way: a tier behind its client and runner, as an engine uses it, digests on."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from kvtier_sdk import (
    Job,
    Namespace,
    Operation,
    RequestContext,
    TierClient,
    TierListener,
    TierSpec,
    Verdict,
    open_tier,
)
from ways.way import Way, Work

_REQUEST = RequestContext("bench")
_PATIENT = "600s"


class EngineWay(Way, TierListener):
    """A tier that gets jobs from an engine's thread, as many at a time as other ways have lanes.

    Args:
        work: the chunks to move.
        start: the first key's number.
        keep: leave the chunks in the tier.
        options: the tier's entry.
    """

    name = "kvtier"
    _tier: TierClient

    def __init__(
        self, work: Work, *, start: int = 0, keep: bool = False, **options: object
    ) -> None:
        super().__init__(work)
        self._spec = TierSpec.from_options(
            {**options, "load_deadline": _PATIENT, "store_deadline": _PATIENT}
        )
        self._start = start
        self._keep = keep
        self._opened = ExitStack()
        self._reported = threading.Event()
        step = work.batch_chunks
        self._slots = [range(lane * step, (lane + 1) * step) for lane in range(work.at_a_time)]

    async def open(self) -> None:
        opening = open_tier(
            self._spec,
            self.work.pool,
            Namespace({"bench": 1}),
            self,
            notify=self._reported.set,
        )
        self._tier = self._opened.enter_context(opening)

    async def close(self) -> None:
        if not self._keep:
            # Deleted by the tier itself, so that its directories serve the next round too.
            self._tier.delete(self._keys(0, self.work.keys))
            self._finish()
        self._opened.close()

    async def store(self) -> None:
        self._move(Operation.STORE)

    async def load(self) -> None:
        self._move(Operation.LOAD)

    def cpu_s(self) -> float:
        spent_s = super().cpu_s()
        if self._child is not None:
            spent_s += time.clock_gettime(_process_clock(self._child))
        return spent_s

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._check(job)

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._check(job)

    def released(self, tier: TierClient, job: Job) -> None:
        self._slots.append(job.tag)

    @property
    def _child(self) -> int | None:
        return getattr(self._tier._runner, "pid", None)

    def _move(self, operation: Operation) -> None:
        call = self._tier.store if operation is Operation.STORE else self._tier.load
        step = self.work.batch_chunks
        starts = iter(range(0, self.work.chunks, step))
        while True:
            for start in itertools.islice(starts, len(self._slots)):
                slots = self._slots.pop(0)
                keys = self._keys(start, min(start + step, self.work.chunks))
                call(keys, slots[: len(keys)], _REQUEST, tag=slots)
            self._tier.flush()
            if self._tier.is_idle:
                return
            self._wait()

    def _finish(self) -> None:
        self._tier.flush()
        while not self._tier.is_idle:
            self._wait()

    def _wait(self) -> None:
        self._reported.wait(1.0)
        self._reported.clear()
        self._tier.poll()

    def _keys(self, start: int, end: int) -> list[bytes]:
        return [b"%036d" % (self._start + number % self.work.keys) for number in range(start, end)]

    def _check(self, job: Job) -> None:
        assert job.result is not None
        if set(job.result.verdicts) != {Verdict.OK}:
            raise SystemExit(f"a {job.operation.value} failed: {job.result.error}")


def _process_clock(pid: int) -> int:
    """Return the id of the clock that counts a process's CPU time, as the kernel composes it."""
    return (~pid << 3) | 2
