"""An index of a namespace's chunks by the time and number of uses, without I/O or a lock."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import TypeAlias

from kvtier_file.chunks import USE_NS, earlier_uses
from kvtier_sdk import OffloadKey

#: Time of the last use, key, and size in bytes. The time is in nanoseconds since the epoch, and its
#: last digits count earlier uses. The index's dictionary and heaps share the tuples to save memory.
Use: TypeAlias = tuple[int, OffloadKey, int]

# The divisor in `staleness_ns` is 1 after one use, and grows by this each time the uses double.
_WEIGHT = 0.5
# Maps a time's last digits to the chunk's class: log2 of the number of uses, rounded down.
_CLASS_OF = tuple((earlier_uses(digits) + 1).bit_length() - 1 for digits in range(USE_NS))
_STAY = tuple(1 + _WEIGHT * of for of in range(max(_CLASS_OF) + 1))

# Rebuild the heaps when their outdated entries outnumber the current entries by more than this.
_MAX_OUTDATED = 64


def staleness_ns(used_ns: int, now_ns: int) -> float:
    """Return the time since the last use, divided by a factor that grows with the uses."""
    return (now_ns - used_ns) / _STAY[_CLASS_OF[used_ns % USE_NS]]


class RecencyIndex:
    """An index that finds the chunk to evict next without a scan of all chunks."""

    def __init__(self) -> None:
        self._uses: dict[OffloadKey, Use] = {}
        self._heaps: list[list[Use]] | None = None  # one for each class; ``None`` until needed
        self._outdated = 0

    def __len__(self) -> int:
        return len(self._uses)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._uses

    def __iter__(self) -> Iterator[Use]:
        return iter(self._uses.values())

    def size_bytes(self, key: OffloadKey) -> int:
        use = self._uses.get(key)
        return 0 if use is None else use[2]

    def put(self, use: Use) -> int:
        """Set a chunk's use and size; return its earlier size, or 0 if it is new."""
        size_bytes = self.discard(use[1])
        self._uses[use[1]] = use
        if self._heaps is not None:
            heapq.heappush(self._heaps[_CLASS_OF[use[0] % USE_NS]], use)
            if self._outdated > len(self._uses) + _MAX_OUTDATED:
                self._heaps = None
        return size_bytes

    def discard(self, key: OffloadKey) -> int:
        """Forget a chunk; return its size, or 0 if it is unknown."""
        use = self._uses.pop(key, None)
        if use is None:
            return 0
        self._outdated += 1
        return use[2]

    def oldest(self) -> Use | None:
        return min(self._fronts(), default=None)

    def stalest(self, now_ns: int) -> tuple[float, Use] | None:
        """Return the staleness and use of the chunk to evict next."""
        fronts = ((staleness_ns(use[0], now_ns), use) for use in self._fronts())
        return min(fronts, key=lambda front: (-front[0], front[1]), default=None)

    def _fronts(self) -> list[Use]:
        """Return the least recently used chunk of each class."""
        if self._heaps is None:
            self._heaps = [[] for _ in _STAY]
            self._outdated = 0
            for use in self._uses.values():
                self._heaps[_CLASS_OF[use[0] % USE_NS]].append(use)
            for heap in self._heaps:
                heapq.heapify(heap)
        for heap in self._heaps:
            while heap and self._uses.get(heap[0][1]) is not heap[0]:
                heapq.heappop(heap)
                self._outdated -= 1
        return [heap[0] for heap in self._heaps if heap]
