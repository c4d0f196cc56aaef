"""A thread that plays the engine: steps of Python and small calls of torch, back to back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

_PYTHON_TURNS = 1500
_TORCH_CALLS = 8
_WIDTH = 64


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

    def run(self, seconds: float, turn: Callable[[], object]) -> npt.NDArray[np.float64]:
        """Play steps.

        Args:
            seconds: duration of the run.
            turn: called at the start of each step, as part of it.

        Returns:
            Wall time and CPU time of each step in seconds, a row each.
        """
        # As an engine does after its start, so that imported modules are not collected every time.
        gc.collect()
        gc.freeze()
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
