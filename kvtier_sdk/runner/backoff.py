"""Pauses before retries."""

from __future__ import annotations

import random

#: The largest share by which jitter shortens a pause. It never lengthens one, so that a tier is
#: used within one probe interval of its recovery.
JITTER = 0.1


class Backoff:
    """Pauses that double up to the longest. Pure state.

    Attributes:
        pause_s: length of the last pause, or of the first one to come, before jitter.
    """

    def __init__(self, first_s: float, longest_s: float, rng: random.Random | None = None) -> None:
        self.pause_s = first_s
        self._first_s = first_s
        self._longest_s = longest_s
        self._rng = rng
        self._next_s = first_s

    def next_s(self) -> float:
        """Begin a pause; return its length in seconds."""
        self.pause_s = self._next_s
        self._next_s = min(2 * self._next_s, self._longest_s)
        return self.pause_s * (self._rng.uniform(1 - JITTER, 1) if self._rng else 1.0)

    def reset(self) -> None:
        """Make the next pause as short as the first one."""
        self.pause_s = self._next_s = self._first_s
