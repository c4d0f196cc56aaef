"""Cost of a working tier for the engine: the length of its steps, beside an engine without tiers.

A thread plays the engine (``busy_engine.py``): steps of Python and torch, back to back. Each step
hands the tier as many chunks of 2 MiB as are due, stores and loads in turns. The ways:

    idle      nothing is offered: a quarter of a second of it before each quarter of the others,
              which are compared with it
    thread    the tier in a thread of the engine's process
    process   the tier in a process of its own
    apart     the same load from another program, unknown to the engine's process: the cost of
              moving these bytes for any engine on this machine, the limit

A star marks the choice of ``runner=auto``. A step is running, or queued (it could run, but the
kernel runs others: too few processors), or asleep: it does no I/O, so it waits for the interpreter
lock. All figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import results
from busy_engine import PARTS, BusyEngine, Steps
from offered_load import Load, offered_apart, offered_here
from results import Series

from kvtier_sdk import TierSpec
from kvtier_sdk.runner.factory import wants_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.redis_server import Server
from support.s3_server import S3Server

WAYS = ("thread", "process", "apart")
_STEP_S = 0.005
_TURN_S = 0.25
_HEADS = ("p50 ms", "p99 ms", "p50", "p99", "MB/s", *PARTS, *PARTS)
_DIGITS = (2, 2, 2, 2, 0, *(0,) * 2 * len(PARTS))


def main() -> None:
    """Run the rounds and print a table for each tier and rate."""
    arguments = _arguments()
    engine = BusyEngine(_STEP_S, alone=arguments.pin)
    print(
        f"Python {platform.python_version()}, {os.cpu_count()} processors"
        f"{', one of them for the engine alone' if arguments.pin else ''}, "
        f"{arguments.rounds} rounds of {arguments.seconds:g} s a way"
    )
    measured: list[Series] = []
    for name in arguments.tier:
        directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.directory)
        with directory as path, _TIERS[name](Path(path)) as url:
            for mbps in arguments.mbps:
                measured += _compare(engine, name, url, mbps, arguments)
    results.write(arguments.json, measured, root=arguments.directory)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tier", choices=_TIERS, nargs="+", default=list(_TIERS), help="all")
    parser.add_argument("--mbps", type=float, nargs="+", default=[300, 800], help="%(default)s")
    parser.add_argument("--way", choices=WAYS, nargs="+", default=WAYS, help="all")
    parser.add_argument("--rounds", type=int, default=3, help="to take medians over; %(default)s")
    parser.add_argument("--seconds", type=float, default=5, help="of each way; %(default)s")
    parser.add_argument("--directory", help="for files and servers; default: a temporary one")
    parser.add_argument(
        "--pin",
        action="store_true",
        help="the first processor for the engine's thread alone, all else on the others",
    )
    results.add_option(parser)
    return parser.parse_args()


# --- ways -------------------------------------------------------------------------------------


def _compare(
    engine: BusyEngine, tier: str, url: str, mbps: float, arguments: argparse.Namespace
) -> list[Series]:
    rows: dict[str, list[npt.NDArray[np.float64]]] = {"idle": []}
    for number in range(arguments.rounds):
        for way in results.in_turns(arguments.way, number):
            with _open(way, url, mbps) as load:
                idle, busy, mb_per_s = _measure(engine, load, arguments.seconds)
            rows["idle"].append(_row(idle, idle, 0.0))
            rows.setdefault(way, []).append(_row(busy, idle, mb_per_s))
    chosen = "process" if wants_process(TierSpec.from_url(url)) else "thread"
    _print_table(f"{tier}, {mbps:g} MB/s offered", chosen, rows)
    return [
        Series(tier, f"{mbps:g} MB/s", way, quantity, unit, list(np.array(rows[way])[:, column]))
        for way in arguments.way
        for quantity, unit, column in (("p50", "", 2), ("p99", "", 3), ("moved", "MB/s", 4))
    ]


def _open(way: str, url: str, mbps: float) -> AbstractContextManager[Load]:
    return offered_apart(url, mbps) if way == "apart" else offered_here(url, mbps, way)


def _measure(
    engine: BusyEngine, load: Load, seconds: float
) -> tuple[list[Steps], list[Steps], float]:
    """Measure steps without and with the load, in turns, and the MB/s moved."""
    idle, busy, moved = [], [], []
    turns = max(1, round(seconds / _TURN_S))
    for _ in range(turns):
        idle.append(engine.run(seconds / turns, lambda: None))
        load.begin()
        busy.append(engine.run(seconds / turns, load.turn))
        moved.append(load.rest())
    moved_bytes, spent_s = np.sum(moved, axis=0)
    return idle, busy, moved_bytes / spent_s / 1e6


def _row(
    busy_turns: Sequence[Steps], idle_turns: Sequence[Steps], mb_per_s: float
) -> npt.NDArray[np.float64]:
    """Return the figures of a line of the table."""
    busy, idle = Steps.joined(busy_turns), Steps.joined(idle_turns)
    here_s, there_s = (np.quantile(steps.wall_s, [0.5, 0.99]) for steps in (busy, idle))
    # A machine whose own speed changes from second to second has it in a turn and in its neighbour.
    by_turn = [
        np.median(turn.wall_s) / np.median(beside.wall_s)
        for turn, beside in zip(busy_turns, idle_turns, strict=True)
    ]
    ratios = [np.median(by_turn), here_s[1] / there_s[1]]
    more_s = [
        busy.mean_s(slowest=slowest) - idle.mean_s(slowest=slowest) for slowest in (False, True)
    ]
    return np.concatenate([here_s * 1e3, ratios, [mb_per_s], *(1e6 * s for s in more_s)])


def _print_table(title: str, chosen: str, rows: dict[str, list[npt.NDArray[np.float64]]]) -> None:
    print(f"\n{title}")
    print(f"{'':30}{'to idle':>20}{'':10}{'us a step, more than idle':>30}{'its slowest 1 %':>30}")
    print(f"{'':10}" + "".join(f"{head:>10}" for head in _HEADS))
    for way, each in rows.items():
        figures = zip(np.median(each, axis=0), _DIGITS, strict=True)
        cells = "".join(f"{figure:10.{digits}f}" for figure, digits in figures)
        print(f"{way + ('*' if way == chosen else ''):10}{cells}", flush=True)


# --- tiers ------------------------------------------------------------------------------------


@contextmanager
def _file(directory: Path) -> Iterator[str]:
    yield f"file://{directory}/chunks?capacity=2GiB"


@contextmanager
def _redis(directory: Path) -> Iterator[str]:
    # Chunks beyond that are evicted silently, as in a server that is used as a cache.
    server = Server(directory, "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
    try:
        yield server.start().url
    finally:
        server.kill()


@contextmanager
def _s3(directory: Path) -> Iterator[str]:
    with S3Server(directory) as server:
        yield server.url


_TIERS: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "file": _file,
    "redis": _redis,
    "s3": _s3,
}


if __name__ == "__main__":
    main()
