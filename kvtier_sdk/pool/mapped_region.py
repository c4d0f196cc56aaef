"""The mappings of this process's memory, as the kernel lists them."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple, Self


class MappedRegion(NamedTuple):
    """A line of ``/proc/self/maps``.

    Attributes:
        start: the address of its first byte.
        end: the address after its last byte.
        is_shared: true if writes reach other processes that map the file.
        offset: the file offset of its first byte.
        file: the file's device and inode.
        path: the file's name; empty if it has none.
    """

    start: int
    end: int
    is_shared: bool
    offset: int
    file: tuple[int, int]
    path: str

    @classmethod
    def at(cls, address: int) -> Self | None:
        """Return the region that an address lies in; ``None`` if there is none."""
        with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                region = cls._read(line)
                if region.start <= address < region.end:
                    return region
        return None

    @classmethod
    def _read(cls, line: str) -> Self:
        addresses, permissions, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
        start, end = (int(part, 16) for part in addresses.split("-"))
        major, minor = (int(part, 16) for part in device.split(":"))
        file = os.makedev(major, minor), int(inode)
        return cls(start, end, permissions.endswith("s"), int(offset, 16), file, "".join(path))
