"""The host pool: the memory of the primary tier, cut into slots."""

from __future__ import annotations

import mmap

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.frame import round_up
from kvtier_sdk.units import format_bytes

#: Rows begin at multiples of this many bytes: what direct I/O asks for.
ROW_ALIGNMENT = 4096


class HostPool:
    """Slots in one anonymous mapping of this process, faulted in at once.

    Attributes:
        slots: how many there are.
        chunk_bytes: payload of a slot.
        row_bytes: distance between slots: ``chunk_bytes`` rounded up to 4,096.

    Args:
        slots: how many slots, at least 1.
        chunk_bytes: payload of each, at least 1.

    Raises:
        ConfigError: a number is out of range, or the memory is not there.
    """

    def __init__(self, slots: int, chunk_bytes: int) -> None:
        if slots < 1 or chunk_bytes < 1:
            raise ConfigError(
                f"a host pool needs at least one slot of one byte, not {slots} of {chunk_bytes}"
            )
        self.slots = slots
        self.chunk_bytes = chunk_bytes
        self.row_bytes = round_up(chunk_bytes, ROW_ALIGNMENT)
        size_bytes = slots * self.row_bytes
        available_bytes = _available_memory_bytes()
        if size_bytes > available_bytes:
            raise ConfigError(
                f"a host pool of {slots} slots of {format_bytes(self.row_bytes)} needs "
                f"{format_bytes(size_bytes)}; {format_bytes(available_bytes)} of memory are "
                "available: use fewer slots"
            )
        # MAP_POPULATE: a page fault in mid-copy would stall the engine.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._mapping = mmap.mmap(-1, size_bytes, flags=flags)
        self._view = memoryview(self._mapping)

    def view(self, slot: int) -> memoryview:
        """A slot's payload.

        Args:
            slot: index, from 0.

        Returns:
            A writable view of ``chunk_bytes`` bytes, contiguous, format ``B``. It keeps the
            memory alive.

        Raises:
            IndexError: there is no such slot.
        """
        return self.padded_view(slot, 1)

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        """A slot's payload and the padding behind it.

        Args:
            slot: index, from 0.
            alignment: power of two up to 4,096.

        Returns:
            As :meth:`view`, its length rounded up to ``alignment``.

        Raises:
            IndexError: there is no such slot.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of a pool of {self.slots}")
        start = slot * self.row_bytes
        return self._view[start : start + round_up(self.chunk_bytes, alignment)]

    def close(self) -> None:
        """Give the memory back; with views of it still out, when the last of them is gone."""
        self._view.release()
        try:
            self._mapping.close()
        except BufferError:
            # Somebody still holds a view: a tier whose I/O hangs, most likely. Unmapping under
            # it would be a crash; the mapping goes with the view.
            return


def _available_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")
