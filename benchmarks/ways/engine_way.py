"""A tier behind a client and a runner, with digests, as in an engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from kvtier_sdk import Job, Namespace, Operation, RequestContext, TierSpec, Verdict
from kvtier_sdk.engine import TierClient, TierListener, open_tier
from ways.way import Way, Work

_REQUEST = RequestContext("bench")
_PATIENT = "600s"


class EngineWay(Way, TierListener):
    """A way that keeps ``at_a_time`` jobs of a tier in flight, as an engine's thread does."""

    _tier: TierClient

    def __init__(
        self,
        work: Work,
        *,
        start: int = 0,
        keep: bool = False,
        verify: bool = True,
        **options: object,
    ) -> None:
        super().__init__(work)
        spec = TierSpec.from_options(
            {**options, "load_deadline": _PATIENT, "store_deadline": _PATIENT}
        )
        self._spec = replace(spec, verify=verify)
        self._start = start
        self._keep = keep
        self._opened = ExitStack()
        self._reported = threading.Event()
        self._lanes = work.at_a_time

    async def open(self) -> None:
        pool, namespace = self.work.pool, Namespace({"dtype": "bfloat16"})
        opening = open_tier(self._spec, pool, namespace, self, notify=self._reported.set)
        self._tier = self._opened.enter_context(opening)

    async def close(self) -> None:
        if not self._keep:
            self.delete()
        self._opened.close()

    def delete(self) -> None:
        """Delete the chunks through the tier, which keeps its directories for the next round."""
        self._tier.delete(self._keys(range(self.work.keys)))
        self._tier.flush()
        while not self._tier.is_idle:
            self._wait()

    async def store(self) -> None:
        self._move(Operation.STORE)

    async def load(self) -> None:
        self._move(Operation.LOAD)

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._check(job)

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._check(job)

    def released(self, tier: TierClient, job: Job) -> None:
        self._lanes += 1

    def _move(self, operation: Operation) -> None:
        call = self._tier.store if operation is Operation.STORE else self._tier.load
        batches = iter(self.work.batches())
        while True:
            for numbers in itertools.islice(batches, self._lanes):
                self._lanes -= 1
                # Without a tag, all batches of a request would be combined into a single job.
                call(self._keys(numbers), numbers, _REQUEST, tag=numbers)
            self._tier.flush()
            if self._tier.is_idle:
                return
            self._wait()

    def _wait(self) -> None:
        self._reported.wait(1.0)
        self._reported.clear()
        self._tier.poll()

    def _keys(self, numbers: Iterable[int]) -> list[bytes]:
        return [b"%036d" % (self._start + number % self.work.keys) for number in numbers]

    def _check(self, job: Job) -> None:
        assert job.result is not None
        if set(job.result.verdicts) != {Verdict.OK}:
            raise SystemExit(f"a {job.operation.value} failed: {job.result.error}")
