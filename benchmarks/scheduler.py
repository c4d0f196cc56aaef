"""Cost of the manager for the scheduler's thread, beside vLLM's own manager and beside no tiers.

Usage: python benchmarks/scheduler.py [TRACE] [--rounds N] [--concurrency N ...]

First the cost: CPU microseconds of the scheduler's thread per chunk, in the calls of vLLM's
connector (see ``connector_loop.py``). The sides are no tier, the memory tier, both with the policy
``lru`` too, and, where vllm is installed, vLLM's tiering manager with a tier in memory: once behind
threads, as its tiers for files and objects work, and once answering at once, the best case, which
no real store offers. Between two steps the tiers finish all their jobs, so that all sides do the
same work.

Then the interference: wall microseconds of a single call while the file tier writes as fast as it
can, beside the same loop without tiers. Here the steps have a fixed length and do not wait for the
tier, so that its queue is full.

Sides take turns within a round; shown are medians over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import results
from connector_loop import PERCENTILES, ConnectorLoop, Figures, Side
from kvtier_side import KVTierSide
from results import Series

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.core import CORE
from kvtier_sdk.options.units import format_bytes, parse_bytes
from kvtier_sdk.replay import ReplayRequest, chat_workload, read_trace

_SMALL_CHUNK_BYTES = 4096
_VLLM_SIDES = ("vLLM, thread", "vLLM, at once")


def main() -> None:
    """Run the rounds and print the tables."""
    arguments = _arguments()
    workload = (
        read_trace(arguments.trace) if arguments.trace else chat_workload(arguments.requests, 0)
    )
    loop = SystemClock().new_event_loop()
    loop.close()
    print(
        f"Python {platform.python_version()}, {CORE} core, "
        f"event loop of {type(loop).__module__.split('.')[0]}, "
        f"{sum(len(request.keys) for request in workload)} chunks, {arguments.slots} slots, "
        f"medians of {arguments.rounds} rounds"
    )
    measured: list[Series] = []
    for concurrency in arguments.concurrency:
        measured += _measure_cost(workload, concurrency, arguments)
    for concurrency in () if arguments.cost_only else arguments.concurrency:
        measured += _measure_interference(workload, concurrency, arguments)
    results.write(arguments.json, measured, absent=_absent())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="block-hash trace; default: chats")
    parser.add_argument("--requests", type=_positive, default=1000, help="of the chats")
    parser.add_argument("--rounds", type=_positive, default=3, help="to take medians over")
    parser.add_argument(
        "--concurrency", type=_positive, nargs="+", default=[1, 8], help="requests that overlap"
    )
    parser.add_argument(
        "--cost-only", action="store_true", help="leave the calls beside a saturated tier out"
    )
    parser.add_argument("--slots", type=_positive, default=2000, help="of the primary tier")
    parser.add_argument(
        "--file-chunk-bytes",
        type=parse_bytes,
        default="64KiB",
        help="of a chunk beside the saturated file tier; default: 64KiB",
    )
    parser.add_argument(
        "--step-ms",
        type=float,
        default=2.0,
        help="how long the model runs beside the saturated file tier; default: 2",
    )
    results.add_option(parser)
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} should be at least 1")
    return number


# --- cost -------------------------------------------------------------------------------------


def _cost(
    workload: Sequence[ReplayRequest],
    concurrency: int,
    arguments: argparse.Namespace,
    *,
    each_lookup: bool = False,
) -> dict[str, list[Figures]]:
    """Play the rounds of all sides; with ``each_lookup`` only one, with every lookup sampled."""
    slots = arguments.slots
    sides: dict[str, Callable[[], Side]] = {
        "no tier": lambda: KVTierSide(slots, _SMALL_CHUNK_BYTES),
        "no tier, lru": lambda: KVTierSide(slots, _SMALL_CHUNK_BYTES, policy="lru"),
        "memory tier": lambda: KVTierSide(slots, _SMALL_CHUNK_BYTES, "memory:"),
        "memory tier, lru": lambda: KVTierSide(slots, _SMALL_CHUNK_BYTES, "memory:", policy="lru"),
        **_vllm_sides(slots),
    }

    def play(make: Callable[[], Side]) -> Figures:
        def drive(side: Side) -> ConnectorLoop:
            return ConnectorLoop(side, _SMALL_CHUNK_BYTES, each_lookup=each_lookup)

        return _play(make, drive, workload, concurrency)

    return _take_turns(sides, 1 if each_lookup else arguments.rounds, play)


def _measure_cost(
    workload: Sequence[ReplayRequest], concurrency: int, arguments: argparse.Namespace
) -> list[Series]:
    rounds = _cost(workload, concurrency, arguments)
    medians = {name: _median(figures) for name, figures in rounds.items()}
    sampled = _cost(workload, concurrency, arguments, each_lookup=True)
    for name, (figures,) in sampled.items():
        medians[name].percentiles_us["lookup"] = figures.percentiles_us["lookup"]

    print(f"\ncost of the scheduler's thread, {concurrency} request(s) at a time")
    _print_row("", medians)
    for name in medians["memory tier"].work:
        _print_row(name, (f"{each.work[name]:.3f}" for each in medians.values()))
    kinds = list(medians["memory tier"].us_per_chunk)
    print(" CPU microseconds per chunk, by call")
    for kind in kinds:
        _print_row(kind, (f"{each.us_per_chunk.get(kind, 0.0):.2f}" for each in medians.values()))
    ours = rounds["memory tier"]
    _print_row("beside the memory tier", (_ratio(each, ours) for each in rounds.values()))
    print(" CPU microseconds of a single call: p50 / p99 / p99.9")
    _print_percentiles(["lookup", *kinds], medians.values())
    group = _group(concurrency)
    measured = [
        Series(group, kind, name, "CPU a chunk", "us", [one.us_per_chunk[kind] for one in each])
        for name, each in rounds.items()
        for kind in each[0].us_per_chunk
    ]
    return measured + [
        Series(group, f"p{share:g}", name, "CPU of a call", "us", values)
        for name, each in rounds.items()
        for share, values in zip(PERCENTILES, _percentiles(each), strict=True)
    ]


def _percentiles(rounds: Sequence[Figures]) -> Iterable[tuple[float, ...]]:
    """Return, for each of the percentiles of a call, its values over the rounds."""
    return zip(*(one.percentiles_us["all"] for one in rounds), strict=True)


def _group(concurrency: int) -> str:
    return f"{concurrency} at a time"


def _absent() -> dict[str, str]:
    if importlib.util.find_spec("vllm") is not None:
        return {}
    return dict.fromkeys(_VLLM_SIDES, "vllm is not installed here")


def _vllm_sides(slots: int) -> dict[str, Callable[[], Side]]:
    if _absent():
        print("vllm is not installed here: its manager is left out")
        return {}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm_side import VLLMSide

    makes = (
        lambda: VLLMSide(slots, _SMALL_CHUNK_BYTES, threaded=True),
        lambda: VLLMSide(slots, _SMALL_CHUNK_BYTES, threaded=False),
    )
    return dict(zip(_VLLM_SIDES, makes, strict=True))


def _ratio(theirs: Sequence[Figures], ours: Sequence[Figures]) -> str:
    """Format the ratio of times per chunk within a round: the median, and the range."""
    ratios = sorted(
        them.us_per_chunk["all"] / us.us_per_chunk["all"]
        for them, us in zip(theirs, ours, strict=True)
    )
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


# --- interference -----------------------------------------------------------------------------


def _measure_interference(
    workload: Sequence[ReplayRequest], concurrency: int, arguments: argparse.Namespace
) -> list[Series]:
    slots, chunk_bytes = arguments.slots, arguments.file_chunk_bytes
    step_s = arguments.step_ms / 1e3
    tier_work: list[str] = []

    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        sides: dict[str, Callable[[], Side]] = {
            "no tier": lambda: KVTierSide(slots, chunk_bytes, None, step_s),
            "file tier": lambda: KVTierSide(
                slots, chunk_bytes, f"file://{tempfile.mkdtemp(dir=directory)}", step_s
            ),
        }

        def drive(side: Side) -> ConnectorLoop:
            return ConnectorLoop(side, chunk_bytes, clock_ns=time.perf_counter_ns)

        def play(make: Callable[[], Side]) -> Figures:
            started_s = time.perf_counter()
            stats: list[Any] = []

            def make_watched() -> Side:
                side = make()
                stats.extend(side.manager.stats[1:])
                return side

            figures = _play(make_watched, drive, workload, concurrency)
            for tier in stats:
                spent_s = time.perf_counter() - started_s
                moved_bytes = tier.stored_bytes + tier.loaded_bytes
                tier_work.append(
                    f"{format_bytes(moved_bytes)} in {spent_s:.1f} s, "
                    f"{sum(tier.dropped.values())} chunks dropped"
                )
            return figures

        rounds = _take_turns(sides, arguments.rounds, play)
    medians = {name: _median(figures) for name, figures in rounds.items()}
    print(
        f"\na call beside the saturated file tier, {concurrency} request(s) at a time, chunks of "
        f"{format_bytes(chunk_bytes)}, steps of {arguments.step_ms:g} ms"
    )
    print(f"  the file tier moved {'; '.join(tier_work)}")
    _print_row("", medians)
    print(" microseconds on the wall of a single call: p50 / p99 / p99.9")
    _print_percentiles(list(medians["file tier"].us_per_chunk), medians.values())
    return [
        Series(_group(concurrency), f"p{share:g}", name, "a call", "us", values)
        for name, each in rounds.items()
        for share, values in zip(PERCENTILES, _percentiles(each), strict=True)
    ]


# --- rounds and rows --------------------------------------------------------------------------


def _take_turns(
    sides: dict[str, Callable[[], Side]], rounds: int, play: Callable[[Callable[[], Side]], Figures]
) -> dict[str, list[Figures]]:
    """Play every side in each round, so that a slow machine is slow for all."""
    figures: dict[str, list[Figures]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in results.in_turns(sides, number):
            figures[name].append(play(sides[name]))
    return figures


def _play(
    make: Callable[[], Side],
    drive: Callable[[Side], ConnectorLoop],
    workload: Sequence[ReplayRequest],
    concurrency: int,
) -> Figures:
    side = make()
    # As vLLM's engine does after its start: imported modules need not be collected every time.
    gc.collect()
    gc.freeze()
    try:
        figures = drive(side).play(workload, concurrency)
    finally:
        side.close()
        gc.unfreeze()
    if figures.work["wrong bytes per chunk"]:
        sys.exit("wrong bytes came back: the figures mean nothing")
    return figures


def _median(figures: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""

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


def _print_row(name: str, cells: Iterable[str]) -> None:
    print(f"  {name:22}" + "".join(f"{cell:>25}" for cell in cells))


def _print_percentiles(kinds: Iterable[str], sides: Iterable[Figures]) -> None:
    sides = list(sides)
    for kind in kinds:
        of_kind = (figures.percentiles_us.get(kind, ()) for figures in sides)
        _print_row(kind, (" / ".join(f"{us:.1f}" for us in each) or "-" for each in of_kind))


if __name__ == "__main__":
    main()
