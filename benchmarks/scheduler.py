"""Measure the CPU time of kvtier's manager and of vLLM's in the scheduler's thread.

Usage: python benchmarks/scheduler.py [TRACE] [--rounds N] [--concurrency N ...]

The cost is the CPU time of the scheduler's thread in the calls of vLLM's connector, in microseconds
per chunk (see ``connector_loop.py``). kvtier is measured with a memory tier and without a tier,
each with the policies ``returns`` and ``lru``. If vllm is installed, vLLM's tiering manager is
measured with one tier at a time: "thread" answers from a thread, like vLLM's tiers for files and
objects; "at once" answers without delay, which is impossible for a real store. Between two steps,
the tiers finish all their jobs, so that all sides do the same work. All loaded bytes are compared.

The interference is the wall time of a call, in microseconds, while the file tier writes as fast as
possible. It is compared with the same loop without tiers. For this comparison, the steps have a
fixed length and do not wait for the tier, so the tier's queue is full.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from connector_loop import ConnectorLoop, Side
from runner import Benchmark, Sample, freeze, positive

from kvtier_sdk import (
    HostPool,
    Job,
    JobResult,
    LookupResult,
    Namespace,
    OffloadKey,
    RequestContext,
    SystemClock,
    TierSpec,
    load_policy,
)
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, read_trace
from kvtier_sdk.engine import TieringManager
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.runner.jobs import Report

_POLL_S = 50e-6
# No job takes this long, so no deadline passes while the loop waits for the tiers.
_PATIENT_S = 600.0
_DEADLINES = ("lookup_deadline", "load_deadline", "store_deadline")
_SMALL_CHUNK_BYTES = 4096
_FILE_CHUNK_BYTES = 64 * 1024
_STEP_S = 0.002
_VLLM_SIDES = {"vLLM, thread": True, "vLLM, at once": False}


def main() -> None:
    bench = Benchmark(__doc__, rounds=3)
    bench.option("trace", nargs="?", type=Path, help="block-hash trace; default: chats")
    bench.option("--requests", type=positive, default=1000, help="of the chats")
    bench.option("--concurrency", type=positive, nargs="+", default=[1, 8], help="%(default)s")
    bench.option("--cost-only", action="store_true", help="leave the interference out")
    bench.option("--slots", type=positive, default=2000, help="of the primary tier")
    options = bench.parse()
    workload = read_trace(options.trace) if options.trace else chat_workload(options.requests, 0)
    slots = options.slots
    with bench.folder() as directory:
        large = partial(KVTierSide, slots, _FILE_CHUNK_BYTES, step_s=_STEP_S)
        saturated: dict[str, Callable[[], KVTierSide]] = {
            "file tier": lambda: large(f"file://{tempfile.mkdtemp(dir=directory)}"),
            "no tier": large,
        }
        for concurrency in options.concurrency:
            group = f"{concurrency} at a time"
            play = partial(_play, workload, concurrency, _SMALL_CHUNK_BYTES)
            sides = _sides(slots, bench).items()
            bench.measure(group, {name: partial(_cost, play, make) for name, make in sides})
            play = partial(_play, workload, concurrency, _FILE_CHUNK_BYTES)
            beside = {name: partial(_beside, play, make) for name, make in saturated.items()}
            if not options.cost_only:
                bench.measure(group, beside)
    bench.finish()


def _sides(slots: int, bench: Benchmark) -> dict[str, Callable[[], Side]]:
    ours = partial(KVTierSide, slots, _SMALL_CHUNK_BYTES)
    sides: dict[str, Callable[[], Side]] = {
        "memory tier": partial(ours, "memory:"),
        "memory tier, lru": partial(ours, "memory:", policy="lru"),
        "no tier": ours,
        "no tier, lru": partial(ours, policy="lru"),
    }
    if importlib.util.find_spec("vllm") is None:
        bench.absent = dict.fromkeys(_VLLM_SIDES, "vllm is not installed here")
        return sides
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_side import VLLMSide

    theirs = partial(VLLMSide, slots, _SMALL_CHUNK_BYTES)
    return sides | {
        name: partial(theirs, threaded=threaded) for name, threaded in _VLLM_SIDES.items()
    }


def _cost(
    play: Callable[..., ConnectorLoop], make: Callable[[], Side], number: int
) -> Iterator[Sample]:
    with closing(make()) as side:
        loop = play(side, time.thread_time_ns)
    yield from loop.costs()
    yield from loop.percentiles("CPU of a call")


def _beside(
    play: Callable[..., ConnectorLoop], make: Callable[[], KVTierSide], number: int
) -> Iterator[Sample]:
    with closing(make()) as side:
        loop = play(side, time.perf_counter_ns)
        for tier in side.manager.stats[1:]:
            yield "tier", "moved", "MiB", (tier.stored_bytes + tier.loaded_bytes) / 2**20
            yield "tier", "dropped", "chunks", float(sum(tier.dropped.values()))
    yield from loop.percentiles("a call")


def _play(
    workload: Sequence[ReplayRequest],
    concurrency: int,
    chunk_bytes: int,
    side: Side,
    clock_ns: Callable[[], int],
) -> ConnectorLoop:
    loop = ConnectorLoop(side, chunk_bytes, clock_ns)
    freeze()
    try:
        loop.play(workload, concurrency)
    finally:
        gc.unfreeze()
    return loop


# --- our side ---------------------------------------------------------------------------------


class KVTierSide:
    """kvtier's manager, with digests on.

    The model runs for ``step_s`` seconds. If ``step_s`` is ``None``, the model runs until the tier
    has reported all jobs.
    """

    hit = LookupResult.HIT
    miss = LookupResult.MISS

    def __init__(
        self,
        slots: int,
        chunk_bytes: int,
        url: str | None = None,
        step_s: float | None = None,
        policy: str = "returns",
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
            # With an infinite time for recomputing, the manager loads every chunk that it finds.
            recompute_s=math.inf,
        )
        if url is None:
            return
        spec = TierSpec.from_url(url, **dict.fromkeys(_DEADLINES, _PATIENT_S))

        namespace = Namespace({"engine": "benchmark"})
        self._runner = _CountingRunner(spec, namespace=namespace, pool=self._pool, clock=clock)
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
    _submitted = 0
    _reported = 0

    def _take_report(self, report: Report) -> None:
        super()._take_report(report)
        self._reported += isinstance(report, JobResult)

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        self._submitted += len(jobs)
        return super().submit(jobs)

    def all_reported(self) -> bool:
        return self._reported == self._submitted


if __name__ == "__main__":
    main()
