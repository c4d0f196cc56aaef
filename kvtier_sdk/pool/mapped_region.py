"""Looks up this process's memory mappings in ``/proc/self/maps``."""

from __future__ import annotations

import contextlib
import os
from typing import NamedTuple, Self


class MappedRegion(NamedTuple):
    """A line of ``/proc/self/maps``; ``file`` is the device and inode of the mapped file."""

    start: int
    end: int
    is_shared: bool
    offset: int
    file: tuple[int, int]
    path: str

    @classmethod
    def at(cls, address: int) -> Self | None:
        with contextlib.suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                place, permissions, offset, device, inode, *path = line.rstrip("\n").split(None, 5)
                start, end = (int(part, 16) for part in place.split("-"))
                if start <= address < end:
                    major, minor = (int(part, 16) for part in device.split(":"))
                    file = os.makedev(major, minor), int(inode)
                    is_shared = permissions.endswith("s")
                    return cls(start, end, is_shared, int(offset, 16), file, "".join(path))
        return None
