"""The rate at which a tier loads chunks, measured while it loads."""

from __future__ import annotations

#: Weight of the newest sample in the running mean.
_NEWEST_WEIGHT = 0.2
#: A tier that was judged too slow gets no loads, so no sample would correct the judgement. After
#: this long without a sample it is tried again.
_LIFE_S = 10.0


class LoadRate:
    """Running mean of bytes per second, over the time in which loads were under way."""

    def __init__(self) -> None:
        self._bytes_per_s = 0.0
        self._pending_bytes = 0
        self._since_s = 0.0
        self._sampled_s = 0.0

    def begin(self, now_s: float) -> None:
        """Start the measurement: loads are handed over, and none was under way."""
        self._since_s = now_s

    def note(self, loaded_bytes: int, now_s: float) -> None:
        """Record the end of a load."""
        self._pending_bytes += loaded_bytes
        # Loads that end in the same step count as one sample.
        if now_s <= self._since_s or not self._pending_bytes:
            return
        rate = self._pending_bytes / (now_s - self._since_s)
        weight = _NEWEST_WEIGHT if self._bytes_per_s else 1.0
        self._bytes_per_s += weight * (rate - self._bytes_per_s)
        self._pending_bytes = 0
        self._since_s = self._sampled_s = now_s

    def expected_s(self, size_bytes: int, now_s: float) -> float:
        """Estimate the seconds to load ``size_bytes``; 0.0 without a recent sample."""
        if not self._bytes_per_s or now_s - self._sampled_s > _LIFE_S:
            return 0.0
        return size_bytes / self._bytes_per_s
