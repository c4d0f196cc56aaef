"""Measure how much longer an engine's steps take while a tier works.

A thread acts as the engine and runs steps of Python and torch back to back. At each step the tier
gets stores and loads of 2 MiB of random bytes, at the rate ``--mbps``. The tier runs in one of
these ways:

    process   the tier in a separate process, the default for disks and remote stores
    thread    the tier in a thread of the engine's process
    apart     the best case: another program moves the same bytes, and shares only the machine with
              the engine

The tier rests and works alternately, for a quarter of a second each. p50 and p99 are the ratios of
the steps' times during work to the times during rest. "longer" is the growth of the mean step.
"running" is the part of this growth in which the step's thread ran. In the other part, the thread
waited for a processor or for the interpreter lock.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from offered_load import offered_apart, offered_here
from runner import Benchmark, Sample, freeze
from ways.way import open_subject

TIERS = ("file", "redis")
WAYS = ("process", "thread", "apart")
_STEP_S = 0.005
_TURN_S = 0.25
_PYTHON_TURNS = 1500
_TORCH_CALLS = 8
_WIDTH = 64


def main() -> None:
    bench = Benchmark(__doc__, rounds=3)
    bench.option("--tier", choices=TIERS, nargs="+", default=TIERS, help="all")
    bench.option("--mbps", type=float, nargs="+", default=[300, 800], help="%(default)s")
    bench.option("--way", choices=WAYS, nargs="+", default=WAYS, help="all")
    bench.option("--seconds", type=float, default=5, help="of each way; %(default)s")
    options = bench.parse()
    engine = BusyEngine(_STEP_S)
    for tier in options.tier:
        with open_subject(tier, options.root) as subject:
            for mbps in options.mbps:
                turn = partial(_turn, engine, subject.url, mbps, options.seconds)
                bench.measure(tier, {way: partial(turn, way) for way in options.way})
    bench.finish()


def _turn(
    engine: BusyEngine, url: str, mbps: float, seconds: float, way: str, number: int
) -> Iterator[Sample]:
    idle, busy, moved = [], [], []
    turns = max(1, round(seconds / _TURN_S))
    opening = offered_apart(url, mbps) if way == "apart" else offered_here(url, mbps, way)
    with opening as load:
        for _ in range(turns):
            idle.append(engine.run(seconds / turns, lambda: None))
            load.begin()
            busy.append(engine.run(seconds / turns, load.turn))
            moved.append(load.rest())
    moved_bytes, spent_s = np.sum(moved, axis=0)
    all_busy, all_idle = np.concatenate(busy), np.concatenate(idle)
    # The ratio of two successive turns cancels slow changes of the machine's speed.
    by_turn = [
        np.median(one[:, 0]) / np.median(other[:, 0]) for one, other in zip(busy, idle, strict=True)
    ]
    p99s = [np.quantile(steps[:, 0], 0.99) for steps in (all_busy, all_idle)]
    case = f"{mbps:g} MB/s"
    yield case, "p50", "", float(np.median(by_turn))
    yield case, "p99", "", float(p99s[0] / p99s[1])
    yield case, "moved", "MB/s", moved_bytes / spent_s / 1e6
    for name, more_s in zip(
        ("longer", "running"), all_busy.mean(0) - all_idle.mean(0), strict=True
    ):
        yield case, name, "us", 1e6 * float(more_s)


class BusyEngine:
    """A simulated engine that does the same work in each step.

    Half of the work is Python code, as in a scheduler. The other half is short calls to torch,
    which release and reacquire the interpreter lock, as a kernel launch does.
    """

    def __init__(self, step_s: float) -> None:
        torch.set_num_threads(1)
        self._weights = torch.eye(_WIDTH)
        spent_s = []
        for _ in range(1000):
            started_s = time.thread_time()
            self._piece()
            spent_s.append(time.thread_time() - started_s)
        self._pieces = max(1, round(step_s / float(np.quantile(spent_s, 0.1))))

    def run(self, seconds: float, turn: Callable[[], object]) -> npt.NDArray[np.float64]:
        """Call ``turn`` at the start of each step; return each step's wall and CPU seconds."""
        freeze()
        marks = [(time.perf_counter(), time.thread_time())]
        end_s = marks[0][0] + seconds
        while marks[-1][0] < end_s:
            turn()
            for _ in range(self._pieces):
                self._piece()
            marks.append((time.perf_counter(), time.thread_time()))
        gc.unfreeze()
        return np.diff(np.array(marks), axis=0)

    def _piece(self) -> None:
        table: dict[int, int] = {}
        for number in range(_PYTHON_TURNS):
            table[number * 7919 % 251] = number
        hidden = self._weights
        for _ in range(_TORCH_CALLS):
            hidden = torch.relu(torch.mm(hidden, self._weights))


if __name__ == "__main__":
    main()
