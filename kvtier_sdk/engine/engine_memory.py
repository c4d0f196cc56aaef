"""Slots in an engine's own memory, which a tier reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.layout import ROW_ALIGNMENT
from kvtier_sdk.types import Region


class EngineMemory:
    """A contiguous range of memory, in which an engine keeps its objects.

    Args:
        engine: the engine's name, for messages.
        region: the address and size of the memory; the address is a multiple of 4,096.
        view: the same memory as bytes; required if only a view keeps the memory alive.
    """

    def __init__(self, engine: str, region: Region, view: memoryview | None = None) -> None:
        if view is None:
            array = (ctypes.c_ubyte * region.size_bytes).from_address(region.address)
            view = memoryview(array).cast("B")
        self.region = region
        self._engine = engine
        self._bytes: memoryview | None = view
        self._fd = open_file_of(region)

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

    def slot_at(self, address: int, size_bytes: int) -> int | None:
        """Return the slot of an object of ``size_bytes`` at ``address``.

        Return ``None`` if the object is outside this memory, or not aligned to 4,096 bytes.
        """
        slot, offset = divmod(address - self.region.address, ROW_ALIGNMENT)
        whole = Region(address, round_up(size_bytes, ROW_ALIGNMENT))
        return None if offset or not self.region.covers(whole) else slot

    def close(self) -> None:
        """Release the memory; the engine may free it afterwards."""
        self._bytes = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


class _Slots:
    def __init__(self, memory: EngineMemory, layout: PoolLayout) -> None:
        self.slots = layout.slots
        self.chunk_bytes = layout.chunk_bytes
        self.layout = layout
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

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        """Return a writable view of the object in ``slot`` and its padding up to ``alignment``."""
        # The padding contains no other object, because each object occupies whole pages.
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        start = slot * self.layout.row_bytes
        return self._memory.bytes[start : start + round_up(self.chunk_bytes, alignment)]


class OverlappingSlots(_Slots):
    """Slots for objects of one size. A slot begins every 4,096 bytes of an engine's memory.

    The slots overlap, but the engine's objects never do. The attributes are as in
    :class:`EngineSlots`, but a slot's payload is one object, and ``region`` is the whole memory.

    Raises:
        ConfigError: an object of ``chunk_bytes`` is larger than the engine's ``memory``.
    """

    def __init__(self, memory: EngineMemory, chunk_bytes: int) -> None:
        spare_bytes = memory.region.size_bytes - round_up(chunk_bytes, ROW_ALIGNMENT)
        if spare_bytes < 0:
            raise ConfigError(f"an object of {chunk_bytes} bytes does not fit the engine's memory")
        slots = 1 + spare_bytes // ROW_ALIGNMENT
        super().__init__(memory, PoolLayout(slots, chunk_bytes, stride_bytes=ROW_ALIGNMENT))


class EngineSlots(_Slots):
    """Slots in a memory mapping that belongs to an engine, one slot per row.

    A tier in a child process can map the memory if this process has the mapping's file open.

    Attributes:
        slots: number of slots.
        chunk_bytes: payload of a slot: a whole row, including the engine's padding.
        region: the whole mapping, at its address in this process.
        layout: the geometry of the slots, for a process that maps the memory.

    Args:
        engine: the engine's name, for messages.
        view: the engine's memory, of shape (slots, row bytes), contiguous.
        on_close: called by :meth:`close` to release the mapping; ``None`` if the engine frees it.

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
        flat = view.cast("B")
        super().__init__(EngineMemory(engine, Region.of(flat), flat), PoolLayout(*shape))
        self._on_close = on_close

    def close(self) -> None:
        """Release the mapping, and call ``on_close``."""
        self._memory.close()
        if self._on_close is not None:
            self._on_close()


def open_file_of(memory: Region) -> int | None:
    """Open the file whose first byte is mapped at the start of ``memory``, if there is one."""
    # Search this process's open files too, because the file may be unlinked.
    mapped = _file_mapped_at(memory.address)
    if mapped is None:
        return None
    file, name = mapped
    for path in (name, *(f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))):
        with contextlib.suppress(OSError):
            # Compare before opening, because opening another file, such as a device, may do harm.
            if not _is_file(os.stat(path), file, memory):
                continue
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            # Compare again, because another thread may have replaced the file meanwhile.
            if _is_file(os.fstat(fd), file, memory):
                return fd
            os.close(fd)
    return None


def _file_mapped_at(address: int) -> tuple[tuple[int, int], str] | None:
    """Return the (device, inode) and path of the shared file that begins at ``address``."""
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            place, permissions, offset, device, inode, *path = line.rstrip("\n").split(None, 5)
            if int(place.partition("-")[0], 16) == address:
                if not permissions.endswith("s") or int(offset, 16):
                    return None
                major, minor = (int(part, 16) for part in device.split(":"))
                return (os.makedev(major, minor), int(inode)), "".join(path)
    return None


def _is_file(status: os.stat_result, file: tuple[int, int], memory: Region) -> bool:
    # Refuse a device, whose size is 0, because opening it again may yield other memory.
    is_same = (status.st_dev, status.st_ino) == file
    return is_same and status.st_size >= memory.size_bytes
