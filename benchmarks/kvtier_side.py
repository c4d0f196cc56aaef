"""Our manager as one side of ``scheduler.py``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.pool import HostPool
from kvtier_sdk.registry import load_policy
from kvtier_sdk.replay import ReplayRequest
from kvtier_sdk.runner import ThreadRunner, TierLoop
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.tiering import TieringManager
from kvtier_sdk.types import LookupResult, OffloadKey, RequestContext

_POLL_S = 50e-6
# The tiers are waited for, so no deadline may strike.
_PATIENT_S = 600.0
_DEADLINES = ("lookup_deadline", "load_deadline", "store_deadline")


class KVTierSide:
    """``TieringManager`` with one tier in a thread, digests on, or with none.

    Args:
        slots: of the host pool.
        chunk_bytes: of a chunk.
        url: of the tier.
        step_s: duration of the model's run; ``None`` for as long as the tier has something to do.
        policy: name of the eviction policy.
    """

    hit = LookupResult.HIT
    miss = LookupResult.MISS

    def __init__(
        self,
        slots: int,
        chunk_bytes: int,
        url: str | None = None,
        step_s: float | None = None,
        policy: str = "prefix",
    ) -> None:
        clock = SystemClock()
        self._step_s = step_s
        self._pool = HostPool(slots, chunk_bytes)
        self._runner: _CountingRunner | None = None
        eviction = load_policy(policy)()
        eviction.open(slots)
        self.manager = TieringManager(
            self._pool,
            policy=eviction,
            clock=clock,
            # Nothing is computed, so there is nothing to compare a load with.
            recompute_s=math.inf,
        )
        if url is None:
            return
        spec = TierSpec.from_url(url, **dict.fromkeys(_DEADLINES, _PATIENT_S))

        def make_loop(report: Callable[[Report], None]) -> TierLoop:
            return TierLoop(
                spec,
                namespace=Namespace({"engine": "benchmark"}),
                memory=self._pool,
                clock=clock,
                report=report,
                verify=True,
            )

        self._runner = _CountingRunner(spec.name, make_loop, clock)
        self.manager.add_tier(spec, self._runner)

    def context(self, request: ReplayRequest) -> RequestContext:
        return RequestContext(request.request_id)

    def load_slots(self, spec: Any) -> list[int]:
        return list(spec.slots)

    def store_slots(self, output: Any) -> tuple[Sequence[OffloadKey], Sequence[int]]:
        return output.keys_to_store, output.slots

    def view(self, slot: int) -> memoryview:
        return self._pool.view(slot)

    def step_end_arguments(self, scheduled: Sequence[str]) -> tuple[()]:
        return ()

    def run_model(self) -> None:
        if self._step_s is not None:
            time.sleep(self._step_s)
        elif self._runner is not None:
            while not self._runner.all_reported():
                time.sleep(_POLL_S)

    def close(self) -> None:
        self.manager.shutdown(timeout_s=60.0)
        self._pool.close()


class _CountingRunner(ThreadRunner):
    """A runner that knows if every job was reported; only a benchmark needs to wait for that."""

    def __init__(
        self, name: str, make_loop: Callable[[Callable[[Report], None]], TierLoop], clock: Clock
    ) -> None:
        def make_counted(report: Callable[[Report], None]) -> TierLoop:
            def counted(one: Report) -> None:
                report(one)
                self._reported += isinstance(one, JobResult)

            return make_loop(counted)

        super().__init__(name, make_counted, clock)
        self._submitted = 0
        self._reported = 0

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        self._submitted += len(jobs)
        return super().submit(jobs)

    def all_reported(self) -> bool:
        return self._reported == self._submitted
