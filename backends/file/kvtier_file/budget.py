"""Which chunks there are, what they take, and which of them go to make room. No I/O, no lock."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from kvtier_sdk import OffloadKey, TierCapacityError, format_bytes


class Chunk(NamedTuple):
    """A chunk under the root, of whichever namespace.

    Attributes:
        fingerprint: the namespace's.
        key: the chunk's name in it.
    """

    fingerprint: str
    key: OffloadKey


class Budget:
    """The bytes of stored chunks, least recently used first, and those of writes under way.

    Not safe for several threads by itself, except for ``in``.

    Args:
        capacity_bytes: limit of stored and reserved bytes together, or ``None``.

    Attributes:
        used_bytes: bytes of stored chunks.
        reserved_bytes: bytes promised to writes under way.
    """

    def __init__(self, capacity_bytes: int | None) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes: OrderedDict[Chunk, int] = OrderedDict()
        self._pins: Counter[Chunk] = Counter()
        self._reservations: dict[int, int] = {}
        self._tickets = itertools.count()
        self.used_bytes = 0
        self.reserved_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._sizes

    def add(self, chunk: Chunk, size_bytes: int) -> None:
        """Count a stored chunk, as the most recently used; an older size of it is replaced."""
        self.used_bytes += size_bytes - self._sizes.pop(chunk, 0)
        self._sizes[chunk] = size_bytes

    def touch(self, chunk: Chunk) -> bool:
        """Make a chunk the most recently used.

        Returns:
            Whether it is known.
        """
        if chunk not in self._sizes:
            return False
        self._sizes.move_to_end(chunk)
        return True

    def forget(self, chunk: Chunk) -> bool:
        """Stop counting a chunk, which is gone.

        Returns:
            Whether it was known.
        """
        size_bytes = self._sizes.pop(chunk, None)
        self.used_bytes -= size_bytes or 0
        return size_bytes is not None

    def pin(self, chunks: Iterable[Chunk]) -> None:
        """Keep chunks from being chosen as victims, until as many calls of :meth:`unpin`."""
        self._pins.update(chunks)

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        """Take one :meth:`pin` of each chunk back."""
        for chunk in chunks:
            self._pins[chunk] -= 1
            if not self._pins[chunk]:
                del self._pins[chunk]

    def victims(self, need_bytes: int, headroom_bytes: int | None = None) -> list[Chunk]:
        """Choose what must go before ``need_bytes`` may be reserved.

        Args:
            need_bytes: what is to be written.
            headroom_bytes: how much the file system can take, or ``None`` where that is no
                matter. Writes under way count against it.

        Returns:
            The least recently used chunks without a pin, no more than needed. They stay counted
            until :meth:`forget`.

        Raises:
            TierCapacityError: it would not fit if all of them went; so none should.
        """
        excess_bytes = 0
        limit = ""
        wanted_bytes = self.reserved_bytes + need_bytes
        if self._capacity_bytes is not None:
            excess_bytes = self.used_bytes + wanted_bytes - self._capacity_bytes
            limit = f"capacity is {format_bytes(self._capacity_bytes)}"
        if headroom_bytes is not None and wanted_bytes - headroom_bytes > excess_bytes:
            excess_bytes = wanted_bytes - headroom_bytes
            limit = (
                f"the file system has {format_bytes(max(0, headroom_bytes))} above what min_free "
                "keeps"
            )
        pinned_bytes = sum(self._sizes.get(chunk, 0) for chunk in self._pins)
        evictable_bytes = self.used_bytes - pinned_bytes
        if excess_bytes > evictable_bytes:
            raise TierCapacityError(
                f"no room for {format_bytes(need_bytes)}: {limit}, and only "
                f"{format_bytes(evictable_bytes)} could be evicted"
            )
        chosen = []
        for chunk, size_bytes in self._sizes.items():
            if excess_bytes <= 0:
                break
            if chunk not in self._pins:
                chosen.append(chunk)
                excess_bytes -= size_bytes
        return chosen

    def reserve(self, size_bytes: int) -> int:
        """Promise bytes to a write; the :meth:`victims` for it are gone.

        Returns:
            A ticket for :meth:`commit` and :meth:`release`.
        """
        ticket = next(self._tickets)
        self._reservations[ticket] = size_bytes
        self.reserved_bytes += size_bytes
        return ticket

    def commit(self, ticket: int, chunk: Chunk) -> None:
        """The write has become this chunk."""
        self.add(chunk, self.release(ticket))

    def release(self, ticket: int) -> int:
        """Take a promise back; after that, or after :meth:`commit`, there is nothing to take.

        Returns:
            The bytes that were still reserved.
        """
        size_bytes = self._reservations.pop(ticket, 0)
        self.reserved_bytes -= size_bytes
        return size_bytes
