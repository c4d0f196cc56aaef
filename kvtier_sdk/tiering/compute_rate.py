"""The time in which the engine computes a chunk, learnt while it does."""

from __future__ import annotations

from collections import deque

#: Bursts that are remembered, and how many must be known before they tell anything: the first
#: ones of an engine that warms up are slow.
_BURSTS = 31
_FEWEST = 3
#: A burst that goes on is cut after this long.
_LONGEST_S = 1.0
#: In less no model computes a prompt: nothing was computed.
_SHORTEST_S = 0.002


class ComputeRate:
    """Median time a chunk over the last bursts of prompts, weighted by their chunks.

    A burst is a row of steps in each of which some request computes several chunks. It ends with
    the next step: an engine that schedules ahead begins the step behind a prompt before that is
    computed. Answers complete one chunk of a request at a time, between many steps, and would
    tell nothing of the time in which a prompt is computed again.

    Attributes:
        chunk_s: seconds a chunk; ``None`` until enough bursts are known.
    """

    def __init__(self) -> None:
        self.chunk_s: float | None = None
        self._bursts: deque[tuple[float, int]] = deque(maxlen=_BURSTS)
        self._chunks = 0
        self._since_s = 0.0
        self._has_ended_step = False

    def named(self, chunks: int, now_s: float) -> None:
        """Take the number of chunks that a request computes in this step.

        Args:
            chunks: the number.
            now_s: the time, before they are computed.
        """
        if chunks > 1:
            if not self._chunks:
                self._since_s = now_s
            self._has_ended_step = False
        elif not self._chunks:
            return
        self._chunks += chunks

    def step_ended(self, now_s: float) -> None:
        """Take the end of the engine's decisions for a step, at the time ``now_s``."""
        if self._chunks:
            if self._has_ended_step or now_s - self._since_s > _LONGEST_S:
                self.burst_ended(now_s)
            self._has_ended_step = True

    def burst_ended(self, now_s: float) -> None:
        """End the burst, if there is one: all its chunks are computed at the time ``now_s``."""
        chunks, self._chunks = self._chunks, 0
        self.note(chunks, now_s - self._since_s)

    def note(self, chunks: int, duration_s: float) -> None:
        """Take the time ``duration_s`` in which a number of ``chunks`` was computed."""
        if chunks < 2 or duration_s < _SHORTEST_S:
            return
        self._bursts.append((duration_s / chunks, chunks))
        if len(self._bursts) < _FEWEST:
            return
        left = sum(weight for _, weight in self._bursts) / 2
        for chunk_s, weight in sorted(self._bursts):
            left -= weight
            if left <= 0:
                self.chunk_s = chunk_s
                break
