"""The chunks of one namespace in the order of their last use. No I/O, no lock."""

from __future__ import annotations

import heapq

from kvtier_sdk import OffloadKey

# An outdated entry stays in the heap until it reaches the top. With this many of them, and more
# than there are current ones, the heap is rebuilt.
_MAX_OUTDATED = 64


class RecencyIndex:
    """The time of each chunk's last use; finds the least recently used one without a scan."""

    def __init__(self) -> None:
        self._used_ns: dict[OffloadKey, int] = {}
        self._heap: list[tuple[int, OffloadKey]] = []

    def __len__(self) -> int:
        return len(self._used_ns)

    def __getitem__(self, key: OffloadKey) -> int:
        return self._used_ns[key]

    def touch(self, key: OffloadKey, used_ns: int) -> None:
        """Set the time of a chunk's last use, in nanoseconds since the epoch."""
        if self._used_ns.get(key) == used_ns:
            return
        self._used_ns[key] = used_ns
        heapq.heappush(self._heap, (used_ns, key))
        if len(self._heap) > 2 * len(self._used_ns) + _MAX_OUTDATED:
            self._heap = [(used_ns, key) for key, used_ns in self._used_ns.items()]
            heapq.heapify(self._heap)

    def discard(self, key: OffloadKey) -> None:
        """Forget a chunk. An unknown one is ignored."""
        self._used_ns.pop(key, None)

    def oldest(self) -> tuple[int, OffloadKey] | None:
        """Time and key of the least recently used chunk; ``None`` if there is no chunk."""
        while self._heap:
            used_ns, key = self._heap[0]
            if self._used_ns.get(key) == used_ns:
                return used_ns, key
            heapq.heappop(self._heap)
        return None
