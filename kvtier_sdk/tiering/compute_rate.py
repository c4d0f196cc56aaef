"""Measures the engine's time to compute a chunk while the engine serves requests."""

from __future__ import annotations

from collections import deque

_BURSTS = 31
#: An estimate needs this many bursts (see ComputeRate), because an engine's first bursts are slow.
_FEWEST = 3
#: A burst that is longer than this ends with the current step.
_LONGEST_S = 1.0
#: A burst that is shorter than this is ignored, because no model computes a prompt this fast.
_SHORTEST_S = 0.002


class ComputeRate:
    """The median time per chunk over the last bursts, weighted by each burst's number of chunks.

    A burst begins with a step in which some request computes several chunks. The burst ends one
    step after the last such step, because an engine that schedules ahead begins the next step
    before the prompt is computed. Decoding does not begin a burst, because decoding needs many
    steps for one chunk, and does not show how fast the engine computes a prompt.
    """

    def __init__(self) -> None:
        #: ``None`` until enough bursts are known.
        self.chunk_s: float | None = None
        self._bursts: deque[tuple[float, int]] = deque(maxlen=_BURSTS)
        self._chunks = 0
        self._since_s = 0.0
        self._has_ended_step = False

    def named(self, chunks: int, now_s: float) -> None:
        """Record that a request begins to compute this number of ``chunks`` at ``now_s``."""
        if chunks > 1:
            if not self._chunks:
                self._since_s = now_s
            self._has_ended_step = False
        elif not self._chunks:
            return
        self._chunks += chunks

    def step_ended(self, now_s: float) -> None:
        """Record that the engine has scheduled a step at ``now_s``."""
        if self._chunks:
            if self._has_ended_step or now_s - self._since_s > _LONGEST_S:
                self.burst_ended(now_s)
            self._has_ended_step = True

    def burst_ended(self, now_s: float) -> None:
        """End the current burst, whose chunks were all computed by ``now_s``."""
        chunks, self._chunks = self._chunks, 0
        self.note(chunks, now_s - self._since_s)

    def note(self, chunks: int, duration_s: float) -> None:
        """Record that computing this number of ``chunks`` took ``duration_s`` seconds."""
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
