"""Counts the stored chunks and chooses the chunks to evict, without I/O and without a lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

from kvtier_file.chunks import MAX_USED_NS, ChunkId
from kvtier_file.recency import RecencyIndex, Use
from kvtier_sdk import OffloadKey, TierCapacityError, format_bytes


class Budget:
    """The counted chunks of a root, ordered for eviction. Only ``in`` is thread-safe."""

    def __init__(
        self, capacity_bytes: int | None, last_used_ns: Callable[[ChunkId], int | None]
    ) -> None:
        self.capacity_bytes = capacity_bytes  # ``None`` for no limit
        self._last_used_ns = last_used_ns  # reads the chunk's file, which all processes update
        self._indices: defaultdict[str, RecencyIndex] = defaultdict(RecencyIndex)
        self.used_bytes = 0
        self.latest_ns = 0  # the latest known use of any chunk, including removed chunks
        self._most_ns = MAX_USED_NS

    def know_time(self, most_ns: int) -> None:
        """Set the latest plausible time of use. A chunk with a later time counts as the oldest."""
        self._most_ns = most_ns
        if self.latest_ns > most_ns:  # the clock was set back after a use was recorded
            self.latest_ns = 0
            for use in list(self):
                self.add(*use)

    def __len__(self) -> int:
        return sum(map(len, self._indices.values()))

    def __contains__(self, chunk_id: ChunkId) -> bool:
        index = self._indices.get(chunk_id.fingerprint)
        return index is not None and chunk_id.key in index

    def __iter__(self) -> Iterator[tuple[str, OffloadKey, int, int]]:
        """Yield the arguments of :meth:`add` for each chunk."""
        for fingerprint, index in self._indices.items():
            for used_ns, key, size_bytes in index:
                yield fingerprint, key, size_bytes, used_ns

    def add(self, fingerprint: str, key: OffloadKey, size_bytes: int, used_ns: int) -> None:
        """Count a stored chunk, replacing its earlier size and use."""
        if used_ns > self._most_ns:
            used_ns = 0
        known_bytes = self._indices[fingerprint].put((used_ns, key, size_bytes))
        self.used_bytes += size_bytes - known_bytes
        if used_ns > self.latest_ns:
            self.latest_ns = used_ns

    def discard(self, fingerprint: str, key: OffloadKey) -> None:
        """Stop counting a chunk. An unknown chunk is ignored."""
        self.used_bytes -= self._indices[fingerprint].discard(key)

    def touch(self, chunk_id: ChunkId, used_ns: int) -> None:
        self.latest_ns = max(self.latest_ns, used_ns)
        index = self._indices[chunk_id.fingerprint]
        index.put((used_ns, chunk_id.key, index.size_bytes(chunk_id.key)))

    def excess_bytes(
        self, need_bytes: int, reserved_bytes: int, headroom_bytes: int | None = None
    ) -> int:
        """Return how many bytes to evict to make room; 0 or less if there is room."""
        wanted_bytes = need_bytes + reserved_bytes
        excess_bytes = 0
        if self.capacity_bytes is not None:
            excess_bytes = self.used_bytes + wanted_bytes - self.capacity_bytes
        if headroom_bytes is not None:
            excess_bytes = max(excess_bytes, wanted_bytes - headroom_bytes)
        return excess_bytes

    def victims(
        self,
        need_bytes: int,
        reserved_bytes: int,
        headroom_bytes: int | None = None,
        *,
        pinned: Collection[ChunkId],
        open_namespaces: Collection[str],
    ) -> list[ChunkId]:
        excess_bytes = self.excess_bytes(need_bytes, reserved_bytes, headroom_bytes)
        evictable_bytes = self.used_bytes - sum(
            self._indices[fingerprint].size_bytes(key) for fingerprint, key in pinned
        )
        if excess_bytes > evictable_bytes:
            is_capacity = excess_bytes == self.excess_bytes(need_bytes, reserved_bytes)
            limit = (
                f"capacity is {format_bytes(self.capacity_bytes or 0)}"
                if is_capacity
                else f"the file system has {format_bytes(max(0, headroom_bytes or 0))} above what "
                "min_free keeps"
            )
            raise TierCapacityError(
                f"no room for {format_bytes(need_bytes)}: {limit}, and only "
                f"{format_bytes(evictable_bytes)} can be evicted"
            )
        now_ns = self.latest_ns
        chosen: list[ChunkId] = []
        passed: list[tuple[RecencyIndex, Use]] = []
        try:
            while excess_bytes > 0:
                fingerprint, use = self._stalest(now_ns, open_namespaces)
                counted_ns, key, size_bytes = use
                chunk_id, index = ChunkId(fingerprint, key), self._indices[fingerprint]
                if chunk_id not in pinned:
                    used_ns = self._last_used_ns(chunk_id)
                    # Another process has used this chunk, so record the use and choose again.
                    if used_ns is not None and used_ns > counted_ns:
                        self.touch(chunk_id, used_ns)
                        continue
                    chosen.append(chunk_id)
                    excess_bytes -= size_bytes
                passed.append((index, use))
                index.discard(key)
        finally:
            for index, use in passed:
                index.put(use)
        return chosen

    def oldest(self) -> list[ChunkId]:
        """Return the least recently used chunk of each namespace."""
        oldest = [(fingerprint, index.oldest()) for fingerprint, index in self._indices.items()]
        return [ChunkId(fingerprint, use[1]) for fingerprint, use in oldest if use]

    def expired(self, before_ns: int, *, pinned: Collection[ChunkId]) -> list[ChunkId]:
        """Return the unpinned chunks of all namespaces that were last used before ``before_ns``."""
        chosen: list[ChunkId] = []
        for fingerprint, index in self._indices.items():
            passed: list[Use] = []
            while (use := index.oldest()) and use[0] < before_ns:
                counted_ns, key, _ = use
                chunk_id = ChunkId(fingerprint, key)
                used_ns = self._last_used_ns(chunk_id)
                if used_ns is not None and used_ns > counted_ns:
                    self.touch(chunk_id, used_ns)
                    continue
                if chunk_id not in pinned:
                    chosen.append(chunk_id)
                passed.append(use)
                index.discard(key)
            for use in passed:
                index.put(use)
        return chosen

    def _stalest(self, now_ns: int, open_namespaces: Collection[str]) -> tuple[str, Use]:
        """Return the chunk to evict next. The budget must not be empty."""
        stalest = (
            (fingerprint in open_namespaces, -found[0], fingerprint, found[1])
            for fingerprint, index in self._indices.items()
            if (found := index.stalest(now_ns))
        )
        _, _, fingerprint, use = min(stalest)
        return fingerprint, use
