"""A thread that plays the engine: steps of Python and torch, back to back, and where time goes."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

#: Where a step's time goes: the thread ran, it could have run while the kernel ran others, or it
#: waited for the interpreter lock, since it does no I/O.
PARTS = ("running", "queued", "asleep")
#: Seconds on the wall, running and queued: a row for each of some consecutive steps.
Steps = npt.NDArray[np.float64]

_PYTHON_TURNS = 1500
_TORCH_CALLS = 8
_WIDTH = 64


def mean_parts_s(steps: Steps) -> npt.NDArray[np.float64]:
    """Return the mean seconds of :data:`PARTS` in a step."""
    wall_s, running_s, queued_s = steps.T
    asleep_s = np.maximum(0.0, wall_s - running_s - queued_s)
    return np.array([running_s.mean(), queued_s.mean(), asleep_s.mean()])


class BusyEngine:
    """An engine that does the same work in each step.

    Half of it is Python, as in a scheduler. The other half are small calls of torch, each of which
    releases the interpreter lock and takes it again, as a kernel launch does.

    Args:
        step_s: duration of an undisturbed step.
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

    def run(self, seconds: float, turn: Callable[[], object]) -> Steps:
        """Play steps.

        Args:
            seconds: duration of the run.
            turn: called at the start of each step, as part of it.

        Returns:
            The measurements.
        """
        # As an engine does after its start, so that imported modules are not collected every time.
        gc.collect()
        gc.freeze()
        descriptor = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        try:
            marks = [_mark_ns(descriptor)]
            end_ns = marks[0][0] + seconds * 1e9
            while marks[-1][0] < end_ns:
                turn()
                for _ in range(self._pieces):
                    self._piece()
                marks.append(_mark_ns(descriptor))
        finally:
            os.close(descriptor)
            gc.unfreeze()
        return np.diff(np.array(marks, dtype=np.float64), axis=0) / 1e9

    def _piece(self) -> None:
        table: dict[int, int] = {}
        for number in range(_PYTHON_TURNS):
            table[number * 7919 % 251] = number
        hidden = self._weights
        for _ in range(_TORCH_CALLS):
            hidden = torch.relu(torch.mm(hidden, self._weights))


def _mark_ns(descriptor: int) -> tuple[int, int, int]:
    """Return the time, this thread's running time and its time in the kernel's queue."""
    queued_ns = int(os.pread(descriptor, 100, 0).split()[1])
    return time.perf_counter_ns(), time.thread_time_ns(), queued_ns
