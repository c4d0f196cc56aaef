"""A thread that plays the engine: steps of Python and torch, back to back, and where time goes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

PARTS = ("running", "queued", "asleep")

_PYTHON_TURNS = 1500
_TORCH_CALLS = 8
_WIDTH = 64


@dataclass(frozen=True)
class Steps:
    """Measurements of consecutive steps, one value a step.

    Attributes:
        wall_s: from the start of the step to its end.
        running_s: time in which the thread ran.
        queued_s: time in which it could have run while the kernel ran others.
    """

    wall_s: npt.NDArray[np.float64]
    running_s: npt.NDArray[np.float64]
    queued_s: npt.NDArray[np.float64]

    @classmethod
    def joined(cls, parts: Sequence[Steps]) -> Steps:
        """Join several measurements."""
        names = ("wall_s", "running_s", "queued_s")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def mean_s(self, *, slowest: bool = False) -> npt.NDArray[np.float64]:
        """Return the means of :data:`PARTS`; time neither running nor queued is asleep.

        Args:
            slowest: take the slowest hundredth of the steps only.
        """
        asleep_s = np.maximum(0.0, self.wall_s - self.running_s - self.queued_s)
        chosen = self.wall_s >= np.quantile(self.wall_s, 0.99 if slowest else 0.0)
        parts = [part[chosen].mean() for part in (self.running_s, self.queued_s, asleep_s)]
        return np.array(parts)


class BusyEngine:
    """An engine that does the same work in each step.

    Half of it is Python, as in a scheduler. The other half are small calls of torch, each of which
    releases the interpreter lock and takes it again, as a kernel launch does.

    Args:
        step_s: duration of an undisturbed step.
        alone: give the steps the first processor to themselves. Threads and programs that are
            started between them get the others.
    """

    def __init__(self, step_s: float, *, alone: bool = False) -> None:
        torch.set_num_threads(1)
        self._processors = sorted(os.sched_getaffinity(0))
        self._alone = alone and len(self._processors) > 1
        if self._alone:
            os.sched_setaffinity(0, self._processors[1:])
        self._weights = torch.eye(_WIDTH)
        with self._by_itself():
            self._pieces = max(1, round(step_s / self._piece_s()))

    def run(self, seconds: float, turn: Callable[[], object]) -> Steps:
        """Play steps.

        Args:
            seconds: duration of the run.
            turn: called at the start of each step, as part of it.

        Returns:
            The measurements.
        """
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        try:
            with self._by_itself():
                marks = self._steps(seconds, turn, descriptor)
        finally:
            os.close(descriptor)
        return Steps(*(np.diff(np.array(marks, dtype=np.float64), axis=0) / 1e9).T)

    def _steps(
        self, seconds: float, turn: Callable[[], object], descriptor: int
    ) -> list[tuple[int, int, int]]:
        marks = [_mark_ns(descriptor)]
        end_ns = marks[0][0] + seconds * 1e9
        while marks[-1][0] < end_ns:
            turn()
            for _ in range(self._pieces):
                self._piece()
            marks.append(_mark_ns(descriptor))
        return marks

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        # As an engine does after its start, so that imported modules are not collected every time.
        gc.collect()
        gc.freeze()
        if self._alone:
            os.sched_setaffinity(0, self._processors[:1])
        try:
            yield
        finally:
            if self._alone:
                os.sched_setaffinity(0, self._processors[1:])
            gc.unfreeze()

    def _piece(self) -> None:
        table: dict[int, int] = {}
        for number in range(_PYTHON_TURNS):
            table[number * 7919 % 251] = number
        hidden = self._weights
        for _ in range(_TORCH_CALLS):
            hidden = torch.relu(torch.mm(hidden, self._weights))

    def _piece_s(self) -> float:
        """Measure the duration of an undisturbed piece."""
        spent_s = []
        for _ in range(1000):
            started_s = time.thread_time()
            self._piece()
            spent_s.append(time.thread_time() - started_s)
        return float(np.quantile(spent_s, 0.1))


def _mark_ns(descriptor: int) -> tuple[int, int, int]:
    """Return the time, this thread's running time and its time in the kernel's queue."""
    queued_ns = int(os.pread(descriptor, 100, 0).split()[1])
    return time.perf_counter_ns(), time.thread_time_ns(), queued_ns
