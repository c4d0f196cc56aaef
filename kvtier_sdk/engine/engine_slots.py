"""A host pool that an engine makes itself, as slots for a runner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

import numpy as np

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.host_pool import UNNAMED_HOLDER
from kvtier_sdk.pool.layout import ROW_ALIGNMENT
from kvtier_sdk.pool.mapped_region import MappedRegion
from kvtier_sdk.types import Region


class EngineSlots:
    """Slots in a mapping that belongs to an engine: one row per slot.

    A tier in a process of its own can map it too, if this process has the mapping's file open.

    Attributes:
        slots: number of slots.
        chunk_bytes: payload of a slot: a whole row, the engine's padding included.
        region: the whole mapping, at the address that it has in this process.
        layout: the same geometry, for a process that maps it.

    Args:
        engine: the engine's name, for messages.
        view: the engine's memory, of shape (slots, row bytes), contiguous.
        on_close: called by :meth:`close`, for a mapping that the engine does not release itself.

    Raises:
        ConfigError: rows do not begin at multiples of 4,096 bytes.
    """

    def __init__(
        self, engine: str, view: memoryview, on_close: Callable[[], None] | None = None
    ) -> None:
        shape = view.shape
        if shape is None or len(shape) != 2 or shape[1] % ROW_ALIGNMENT:
            raise ConfigError(
                f"the host memory of {engine} has shape {shape}; expected rows of a multiple of "
                f"{ROW_ALIGNMENT} bytes"
            )
        self._engine = engine
        self.slots, self.chunk_bytes = shape
        self.layout = PoolLayout(self.slots, self.chunk_bytes)
        self._fd = descriptor_of(view)
        # Not a numpy array, which would prevent the engine from releasing its view.
        self._on_close = on_close
        self._bytes: memoryview | None = view.cast("B")
        self.region = Region.of(self._bytes)

    @property
    def is_shared(self) -> bool:
        """True if another process can map the memory; false once it is closed."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """A descriptor of the mapping's file, which :meth:`close` closes.

        Raises:
            KVTierError: no descriptor was found, or the mapping was released.
        """
        if self._fd is None:
            raise KVTierError(f"no descriptor of {self._engine}'s host memory, or it was released")
        return self._fd

    def padded_view(self, slot: int, alignment: int, holder: str = UNNAMED_HOLDER) -> memoryview:
        """Return a slot's payload; a row is a multiple of every alignment.

        Args:
            slot: index of the slot, from 0.
            alignment: a power of two up to 4,096.
            holder: not used: the engine knows who has its slots.

        Returns:
            A writable view of ``chunk_bytes``; it keeps the memory alive.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the mapping was released.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        if self._bytes is None:
            raise KVTierError(f"the host memory of {self._engine} was released")
        start = slot * self.chunk_bytes
        return self._bytes[start : start + self.chunk_bytes]

    def close(self) -> None:
        """Release the mapping."""
        self._bytes = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if self._on_close is not None:
            self._on_close()


def descriptor_of(view: memoryview) -> int | None:
    """Return a new descriptor of the open file that a view maps from its start, or ``None``.

    An engine may not expose the file behind its host memory, but the kernel knows it.
    """
    address = int(np.asarray(view).ctypes.data)
    region = MappedRegion.at(address)
    if region is None or not region.is_shared or (region.start, region.offset) != (address, 0):
        return None
    return _open_descriptor(region.file)


def _open_descriptor(file: tuple[int, int]) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        # Other threads may close the file or reuse its number, but a duplicate stays as it is.
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            status = os.fstat(copy)
            if (status.st_dev, status.st_ino) == file:
                return copy
            os.close(copy)
    return None
