"""The chunks of one namespace in the order of their last use. No I/O, no lock."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from kvtier_sdk import OffloadKey

#: Time of the last use in nanoseconds since the epoch, key, and size in bytes. One object serves
#: the table and the heap: there may be millions.
Use: TypeAlias = tuple[int, OffloadKey, int]

# An outdated entry stays in the heap until it reaches the top. With this many of them, and more
# than there are current ones, the heap is rebuilt.
_MAX_OUTDATED = 64


class RecencyIndex:
    """Size and last use of each chunk; finds the least recently used one without a scan."""

    def __init__(self) -> None:
        self._uses: dict[OffloadKey, Use] = {}
        # Made when the oldest chunk is first asked for: without a limit it never is.
        self._heap: list[Use] | None = None

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._uses

    def __iter__(self) -> Iterator[Use]:
        return iter(self._uses.values())

    def size_bytes(self, key: OffloadKey) -> int:
        """Return the size of a chunk; 0 for an unknown one."""
        use = self._uses.get(key)
        return 0 if use is None else use[2]

    def put(self, use: Use) -> None:
        """Set the last use and the size of a chunk, in place of what was known of it."""
        self._uses[use[1]] = use
        if self._heap is not None:
            heapq.heappush(self._heap, use)
            if len(self._heap) > 2 * len(self._uses) + _MAX_OUTDATED:
                self._heap = None

    def discard(self, key: OffloadKey) -> int:
        """Forget a chunk, and return its size; 0 for an unknown one."""
        use = self._uses.pop(key, None)
        return 0 if use is None else use[2]

    def oldest(self) -> Use | None:
        """Return the least recently used chunk, or ``None`` if there is no chunk."""
        heap = self._heap
        if heap is None:
            heap = self._heap = list(self._uses.values())
            heapq.heapify(heap)
        while heap and self._uses.get(heap[0][1]) is not heap[0]:
            heapq.heappop(heap)
        return heap[0] if heap else None
