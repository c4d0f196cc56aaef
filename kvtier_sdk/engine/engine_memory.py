"""Slots in memory that belongs to an engine, for a tier's reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

import numpy as np

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.host_pool import UNNAMED_HOLDER
from kvtier_sdk.pool.layout import ROW_ALIGNMENT
from kvtier_sdk.pool.mapped_region import MappedRegion
from kvtier_sdk.types import Region


class _Mapping:
    """Memory that belongs to an engine, with a descriptor if other processes can map it."""

    def __init__(self, engine: str, region: Region, view: memoryview, fd: int | None) -> None:
        self.region = region
        self._engine = engine
        self._bytes: memoryview | None = view
        self._fd = fd

    @property
    def is_shared(self) -> bool:
        """True while other processes can map the memory."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """The file descriptor; raises KVTierError if the memory is private or was released."""
        if self._fd is None:
            raise KVTierError(f"the memory of {self._engine} is of one process, or was released")
        return self._fd

    @property
    def bytes(self) -> memoryview:
        """The whole memory, writable until :meth:`close`."""
        if self._bytes is None:
            raise KVTierError(f"the memory of {self._engine} was released")
        return self._bytes

    def close(self) -> None:
        """Release the memory; the engine may free it afterwards."""
        self._bytes = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class EngineMemory(_Mapping):
    """A contiguous range of memory in which an engine keeps its objects.

    Attributes:
        region: the address and size of the memory.

    Args:
        engine: the engine's name, for messages.
        region: the address and size of the memory; the address is a multiple of 4,096.
    """

    def __init__(self, engine: str, region: Region) -> None:
        array = (ctypes.c_ubyte * region.size_bytes).from_address(region.address)
        super().__init__(engine, region, memoryview(array).cast("B"), _open_shared(region))

    def slot_at(self, address: int, size_bytes: int) -> int | None:
        """Return the slot of an object of ``size_bytes`` at ``address``.

        Return ``None`` if the object is outside this memory, or not aligned to 4,096 bytes.
        """
        slot, offset = divmod(address - self.region.address, ROW_ALIGNMENT)
        whole = Region(address, round_up(size_bytes, ROW_ALIGNMENT))
        return None if offset or not self.region.covers(whole) else slot


class OverlappingSlots:
    """Slots for objects of one size; a slot begins every 4,096 bytes of an engine's memory.

    The slots overlap, but the engine's objects never do.

    Attributes:
        chunk_bytes: payload of a slot, which is the length of an object.
        slots: number of slots.
        region: the engine's whole memory.
        layout: the geometry of the slots, for a process that maps the memory.

    Args:
        memory: the engine's memory.
        chunk_bytes: length of an object.

    Raises:
        ConfigError: an object is larger than the memory.
    """

    def __init__(self, memory: EngineMemory, chunk_bytes: int) -> None:
        spare_bytes = memory.region.size_bytes - round_up(chunk_bytes, ROW_ALIGNMENT)
        if spare_bytes < 0:
            raise ConfigError(f"an object of {chunk_bytes} bytes does not fit the engine's memory")
        self.chunk_bytes = chunk_bytes
        self.slots = 1 + spare_bytes // ROW_ALIGNMENT
        self.layout = PoolLayout(self.slots, chunk_bytes, stride_bytes=ROW_ALIGNMENT)
        self.region = memory.region
        self._memory = memory

    @property
    def is_shared(self) -> bool:
        """True if another process can map the memory."""
        return self._memory.is_shared

    @property
    def fd(self) -> int:
        """The file descriptor; raises KVTierError if the memory is private or was released."""
        return self._memory.fd

    def padded_view(self, slot: int, alignment: int, holder: str = UNNAMED_HOLDER) -> memoryview:
        """Return a writable view of the object in ``slot`` and its padding up to ``alignment``.

        The padding holds no other object, because each object occupies whole pages of 4,096 bytes.
        ``holder`` is ignored.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the memory was released.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        start = slot * ROW_ALIGNMENT
        return self._memory.bytes[start : start + round_up(self.chunk_bytes, alignment)]


class EngineSlots(_Mapping):
    """Slots in a memory mapping that belongs to an engine, one slot per row.

    A tier in a child process can map the memory too, if this process has the mapping's file open.

    Attributes:
        slots: number of slots.
        chunk_bytes: payload of a slot: a whole row, including the engine's padding.
        region: the whole mapping, at its address in this process.
        layout: the geometry of the slots, for a process that maps the memory.

    Args:
        engine: the engine's name, for messages.
        view: the engine's memory, of shape (slots, row bytes), contiguous.
        on_close: called by :meth:`close`, to release a mapping that the engine does not release.

    Raises:
        ConfigError: the view has another shape, or a row's length is not a multiple of 4,096.
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
        self.slots, self.chunk_bytes = shape
        self.layout = PoolLayout(self.slots, self.chunk_bytes)
        self._on_close = on_close
        # Keep no numpy array, because an array would prevent the engine from releasing its view.
        flat = view.cast("B")
        super().__init__(engine, Region.of(flat), flat, descriptor_of(view))

    def padded_view(self, slot: int, alignment: int, holder: str = UNNAMED_HOLDER) -> memoryview:
        """Return a writable view of ``slot``; the view keeps the memory alive.

        ``alignment`` is ignored, because every slot is a whole row. ``holder`` is ignored too.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the mapping was released.
        """
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        start = slot * self.chunk_bytes
        return self.bytes[start : start + self.chunk_bytes]

    def close(self) -> None:
        """Release the mapping, and call ``on_close``."""
        super().close()
        if self._on_close is not None:
            self._on_close()


def _open_shared(memory: Region) -> int | None:
    """Open the file of shared memory by path; return ``None`` if that is impossible."""
    mapped = MappedRegion.at(memory.address)
    if (
        mapped is None
        or not mapped.is_shared
        or (mapped.start, mapped.offset) != (memory.address, 0)
    ):
        return None
    with contextlib.suppress(OSError):
        fd = os.open(mapped.path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        # Refuse a device (size 0), because opening a device again would give different memory.
        if (status.st_dev, status.st_ino) == mapped.file and status.st_size >= memory.size_bytes:
            return fd
        os.close(fd)
    return None


def descriptor_of(view: memoryview) -> int | None:
    """If ``view`` maps a file from its start, return a duplicate of a descriptor of that file.

    The engine may not expose its descriptor, but the kernel lists this process's open files.
    """
    address = int(np.asarray(view).ctypes.data)
    region = MappedRegion.at(address)
    if region is None or not region.is_shared or (region.start, region.offset) != (address, 0):
        return None
    return _open_descriptor(region.file)


def _open_descriptor(file: tuple[int, int]) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        # Check a duplicate, because another thread may close the descriptor or reuse its number.
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            status = os.fstat(copy)
            if (status.st_dev, status.st_ino) == file:
                return copy
            os.close(copy)
    return None
