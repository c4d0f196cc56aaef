"""One namespace's chunks by the time of their last use. No I/O, no lock."""

from __future__ import annotations

import heapq

from kvtier_sdk import OffloadKey

# Entries that are out of date stay in the heap until they come to its top, or are this many and
# more than half of it.
_LITTER = 64


class Ages:
    """When each chunk was last used; the oldest is found without looking at the others."""

    def __init__(self) -> None:
        self._used_ns: dict[OffloadKey, int] = {}
        self._heap: list[tuple[int, OffloadKey]] = []

    def __len__(self) -> int:
        return len(self._used_ns)

    def __getitem__(self, key: OffloadKey) -> int:
        return self._used_ns[key]

    def note(self, key: OffloadKey, used_ns: int) -> None:
        """Set the time of a chunk's last use, in nanoseconds since the epoch."""
        if self._used_ns.get(key) == used_ns:
            return
        self._used_ns[key] = used_ns
        heapq.heappush(self._heap, (used_ns, key))
        if len(self._heap) > 2 * len(self._used_ns) + _LITTER:
            self._heap = [(used_ns, key) for key, used_ns in self._used_ns.items()]
            heapq.heapify(self._heap)

    def drop(self, key: OffloadKey) -> None:
        """Forget a chunk, if it is known."""
        self._used_ns.pop(key, None)

    def oldest(self) -> tuple[int, OffloadKey] | None:
        """The time and the key of the chunk that was used least recently; ``None`` without one."""
        while self._heap:
            used_ns, key = self._heap[0]
            if self._used_ns.get(key) == used_ns:
                return used_ns, key
            heapq.heappop(self._heap)
        return None
