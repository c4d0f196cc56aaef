"""The slots of vLLM's own host memory, as a runner sees them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.layout import ROW_ALIGNMENT


class EngineSlots:
    """Slots in a mapping that belongs to vLLM.

    Attributes:
        slots: how many there are.
        chunk_bytes: payload of a slot: a whole row, vLLM's padding included.
        layout: the same, for a process that maps it.

    Args:
        view: of shape (slots, row bytes), contiguous.
        on_close: called by :meth:`close`, if the mapping is not vLLM's to give back.

    Raises:
        ConfigError: rows do not begin at multiples of 4,096 bytes.
    """

    def __init__(self, view: memoryview, on_close: Callable[[], None] | None = None) -> None:
        shape = view.shape
        if shape is None or len(shape) != 2 or shape[1] % ROW_ALIGNMENT:
            raise ConfigError(
                f"vLLM's host memory has shape {shape}; expected slots of a multiple of "
                f"{ROW_ALIGNMENT} bytes"
            )
        self.slots, self.chunk_bytes = shape
        self.layout = PoolLayout(self.slots, self.chunk_bytes)
        self._fd = descriptor_of(view)
        # vLLM releases its view when it shuts down, which an array made from it would forbid.
        self._on_close = on_close
        self._bytes: memoryview | None = view.cast("B")

    @property
    def is_shared(self) -> bool:
        """Whether another process can map it; not once it is closed."""
        return self._fd is not None

    @property
    def fd(self) -> int:
        """A descriptor of the mapping's file, closed with it.

        Raises:
            KVTierError: none was found, or the mapping was given back.
        """
        if self._fd is None:
            raise KVTierError("vLLM's host memory has no descriptor here, or was given back")
        return self._fd

    def view(self, slot: int, holder: str = "nobody named") -> memoryview:
        """A slot's payload.

        Args:
            slot: index, from 0.
            holder: who gets it.

        Returns:
            A writable view of ``chunk_bytes`` bytes; it keeps the memory alive.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the mapping was given back.
        """
        return self.padded_view(slot, 1, holder)

    def padded_view(self, slot: int, alignment: int, holder: str = "nobody named") -> memoryview:
        """As :meth:`view`: a row is a multiple of every alignment that a tier may ask for."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        if self._bytes is None:
            raise KVTierError("vLLM's host memory has been given back")
        start = slot * self.chunk_bytes
        return self._bytes[start : start + self.chunk_bytes]

    def close(self) -> None:
        """Let go of the mapping."""
        self._bytes = None
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if self._on_close is not None:
            self._on_close()


def descriptor_of(view: memoryview) -> int | None:
    """Find the file that a view maps from its beginning on, among those that this process has open.

    vLLM says nowhere in public what its host memory is a mapping of; the kernel does.

    Args:
        view: contiguous.

    Returns:
        A descriptor of it, the caller's to close; ``None`` where the memory is not shared, does
        not begin with its file, or nobody has the file open any more.
    """
    address = int(np.asarray(view).ctypes.data)
    with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            stretch = _Stretch.read(line)
            if stretch.start <= address < stretch.end:
                begins = stretch.start == address and not stretch.offset
                found = stretch.is_shared and begins
                return _open_descriptor(stretch.file, view.nbytes) if found else None
    return None


class _Stretch(NamedTuple):
    """A line of ``/proc/self/maps``; a file is its device and inode."""

    start: int
    end: int
    is_shared: bool
    offset: int
    file: tuple[int, int]

    @classmethod
    def read(cls, line: str) -> _Stretch:
        addresses, permissions, offset, device, inode = line.split(maxsplit=5)[:5]
        start, end = (int(part, 16) for part in addresses.split("-"))
        major, minor = (int(part, 16) for part in device.split(":"))
        file = os.makedev(major, minor), int(inode)
        return cls(start, end, permissions.endswith("s"), int(offset, 16), file)


def _open_descriptor(file: tuple[int, int], size_bytes: int) -> int | None:
    for name in os.listdir("/proc/self/fd"):
        # Other threads open and close files meanwhile: only a copy of one's own stays what it is.
        with contextlib.suppress(OSError):
            copy = os.dup(int(name))
            status = os.fstat(copy)
            if (status.st_dev, status.st_ino) == file and status.st_size >= size_bytes:
                return copy
            os.close(copy)
    return None
