"""Which chunks there are, what they take, and which of them go to make room. No I/O, no lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from kvtier_file.ages import Ages
from kvtier_sdk import OffloadKey, TierCapacityError, format_bytes


class Chunk(NamedTuple):
    """A chunk under the root, of whichever namespace.

    Attributes:
        fingerprint: the namespace's.
        key: the chunk's name in it.
    """

    fingerprint: str
    key: OffloadKey


class Counted(NamedTuple):
    """A chunk as it is counted.

    Attributes:
        chunk: which.
        size_bytes: length of its file.
        used_ns: when it was last used, in nanoseconds since the epoch; it may have been used
            again since by somebody who did not say so.
    """

    chunk: Chunk
    size_bytes: int
    used_ns: int


class Budget:
    """The bytes of stored chunks, whichever process stored them, and the order of their use.

    Not safe for several threads by itself, except for ``in``.

    Args:
        capacity_bytes: limit of stored and reserved bytes together, or ``None``.

    Attributes:
        used_bytes: bytes of stored chunks.
        latest_ns: the latest time of use that was ever heard of.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: dict[Chunk, int] = {}
        self._ages: defaultdict[str, Ages] = defaultdict(Ages)
        self.used_bytes = 0
        self.latest_ns = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._sizes

    def __iter__(self) -> Iterator[Counted]:
        for chunk, size_bytes in self._sizes.items():
            yield Counted(chunk, size_bytes, self._ages[chunk.fingerprint][chunk.key])

    def add(self, counted: Counted) -> None:
        """Count a stored chunk; what was known of it is replaced."""
        chunk, size_bytes, used_ns = counted
        self.used_bytes += size_bytes - self._sizes.get(chunk, 0)
        self._sizes[chunk] = size_bytes
        self.touch(chunk, used_ns)

    def forget(self, chunk: Chunk) -> None:
        """Stop counting a chunk, which is gone; one that is not known is none the less."""
        self.used_bytes -= self._sizes.pop(chunk, 0)
        self._ages[chunk.fingerprint].drop(chunk.key)

    def touch(self, chunk: Chunk, used_ns: int) -> None:
        """Note the time of a known chunk's last use, in nanoseconds since the epoch."""
        self.latest_ns = max(self.latest_ns, used_ns)
        self._ages[chunk.fingerprint].note(chunk.key, used_ns)

    def clear(self) -> None:
        """Forget everything."""
        self._sizes.clear()
        self._ages.clear()
        self.used_bytes = 0

    def excess_bytes(
        self, need_bytes: int, reserved_bytes: int, headroom_bytes: int | None = None
    ) -> int:
        """What must go before there is room.

        Args:
            need_bytes: what is to be written.
            reserved_bytes: what is promised to writes under way.
            headroom_bytes: how much the file system can take, or ``None`` where that is no
                matter. Writes under way count against it.

        Returns:
            Bytes; 0 or less if there is room.
        """
        return self._excess(need_bytes + reserved_bytes, headroom_bytes)[0]

    def victims(
        self,
        need_bytes: int,
        reserved_bytes: int,
        headroom_bytes: int | None = None,
        *,
        pinned: Collection[Chunk],
        in_use: Collection[str],
        last_used_ns: Callable[[Chunk], int | None],
    ) -> list[Chunk]:
        """Choose what goes to make room.

        Args:
            need_bytes: as for :meth:`excess_bytes`.
            reserved_bytes: as for :meth:`excess_bytes`.
            headroom_bytes: as for :meth:`excess_bytes`.
            pinned: chunks that must stay.
            in_use: fingerprints of the namespaces that somebody has open; chunks of others go
                first.
            last_used_ns: when a chunk was really used last, as far as that is known.

        Returns:
            The least recently used chunks, no more than needed. They stay counted until
            :meth:`forget`.

        Raises:
            TierCapacityError: it would not fit if all of them went; so none should.
        """
        excess_bytes, limit = self._excess(need_bytes + reserved_bytes, headroom_bytes)
        evictable_bytes = self.used_bytes - sum(self._sizes.get(chunk, 0) for chunk in pinned)
        if excess_bytes > evictable_bytes:
            raise TierCapacityError(
                f"no room for {format_bytes(need_bytes)}: {limit}, and only "
                f"{format_bytes(evictable_bytes)} could be evicted"
            )
        chosen: list[Chunk] = []
        passed: list[tuple[Chunk, int]] = []
        try:
            while excess_bytes > 0:
                counted_ns, chunk = self._oldest(in_use)
                if chunk not in pinned:
                    used_ns = last_used_ns(chunk)
                    # What is counted is never later than the truth, so the first chunk for which
                    # the two agree is the oldest of all.
                    if used_ns is not None and used_ns > counted_ns:
                        self.touch(chunk, used_ns)
                        continue
                    chosen.append(chunk)
                    excess_bytes -= self._sizes[chunk]
                passed.append((chunk, counted_ns))
                self._ages[chunk.fingerprint].drop(chunk.key)
        finally:
            for chunk, counted_ns in passed:
                self.touch(chunk, counted_ns)
        return chosen

    def _excess(self, wanted_bytes: int, headroom_bytes: int | None) -> tuple[int, str]:
        excess_bytes = 0
        limit = ""
        if self._capacity_bytes is not None:
            excess_bytes = self.used_bytes + wanted_bytes - self._capacity_bytes
            limit = f"capacity is {format_bytes(self._capacity_bytes)}"
        if headroom_bytes is not None and wanted_bytes - headroom_bytes > excess_bytes:
            excess_bytes = wanted_bytes - headroom_bytes
            limit = (
                f"the file system has {format_bytes(max(0, headroom_bytes))} above what min_free "
                "keeps"
            )
        return excess_bytes, limit

    def _oldest(self, in_use: Collection[str]) -> tuple[int, Chunk]:
        """The chunk to go next and its time; there must be one."""
        oldest = (
            (fingerprint in in_use, entry[0], Chunk(fingerprint, entry[1]))
            for fingerprint, ages in self._ages.items()
            if (entry := ages.oldest())
        )
        _, used_ns, chunk = min(oldest)
        return used_ns, chunk
