"""The host pool: the memory of the primary tier, cut into slots."""

from __future__ import annotations

import logging
import mmap
import weakref

import numpy as np

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.frame import round_up
from kvtier_sdk.units import format_bytes

#: Rows begin at multiples of this many bytes: what direct I/O asks for.
ROW_ALIGNMENT = 4096

_log = logging.getLogger("kvtier.pool")


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
        self._mapping: mmap.mmap | None = mmap.mmap(-1, size_bytes, flags=flags)
        self._views: dict[str, memoryview] = {}

    def view(self, slot: int, holder: str = "nobody named") -> memoryview:
        """A slot's payload.

        Args:
            slot: index, from 0.
            holder: who gets it, one of few names; :meth:`close` says it if the view is still out.

        Returns:
            A writable view of ``chunk_bytes`` bytes, contiguous, format ``B``. It, and whatever
            is made from it, keeps the memory alive.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the pool is closed.
        """
        return self.padded_view(slot, 1, holder)

    def padded_view(self, slot: int, alignment: int, holder: str = "nobody named") -> memoryview:
        """A slot's payload and the padding behind it.

        Args:
            slot: index, from 0.
            alignment: power of two up to 4,096.
            holder: as for :meth:`view`.

        Returns:
            As :meth:`view`, its length rounded up to ``alignment``.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the pool is closed.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of a pool of {self.slots}")
        start = slot * self.row_bytes
        whole = self._views.get(holder) or self._whole(holder)
        return whole[start : start + round_up(self.chunk_bytes, alignment)]

    def close(self) -> None:
        """Give the memory back; with views of it still out, when the last of them is gone.

        Who holds views is logged as a warning: a tier whose I/O hangs, most likely. Unmapping
        under them would be a crash. A second call does nothing.
        """
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        arrays = {holder: weakref.ref(whole.obj) for holder, whole in self._views.items()}
        self._views.clear()
        holders = sorted(holder for holder, array in arrays.items() if array() is not None)
        if holders:
            _log.warning(
                "the host pool was closed with views of it still out, handed to: %s; its memory "
                "is given back when the last of them is gone",
                ", ".join(holders),
            )
        else:
            mapping.close()

    def _whole(self, holder: str) -> memoryview:
        """The whole mapping, through an array of this holder's own.

        A view is a slice of this one, and every slice and array made from a view keeps the array
        underneath: it lives exactly as long as the holder, or whoever had it from there, has any.
        """
        if self._mapping is None:
            raise KVTierError("the host pool is closed")
        whole = np.frombuffer(self._mapping, np.uint8).data
        # Two threads may come at once; both must go on with the same one.
        return self._views.setdefault(holder, whole)


def _available_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")
