"""Is there room for a host pool, and are its pages there before an engine touches them?"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.pool.limits import (
    CGROUP_ROOT,
    PROC,
    cached_bytes,
    meminfo_bytes,
    memory_limits,
)

#: Linux 5.14; Python's mmap does not know it, and its madvise holds the interpreter lock.
_MADV_POPULATE_WRITE = 23
#: What one thread faults in at a time.
_STRETCH_BYTES = 64 << 20
_MAX_THREADS = 16
_HUGE_PAGE_BYTES = 2 << 20
_SHMEM_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Room(NamedTuple):
    """What one limit leaves.

    Attributes:
        where: whose limit.
        free_bytes: below it.
        remedy: what to do where that is too little.
    """

    where: str
    free_bytes: int
    remedy: str


def check_room(size_bytes: int, directory: Path | None = None) -> None:
    """Refuse a pool that memory, this process's control groups or a file system cannot hold.

    Args:
        size_bytes: of the pool.
        directory: where its file will be; None for a pool without a name.

    Raises:
        ConfigError: it says what is needed, what is free, and what to do.
    """
    rooms = [_room_of_machine(), *rooms_of_cgroups()]
    if directory is not None:
        rooms.append(_room_of_directory(directory))
    tightest = min(rooms, key=lambda room: room.free_bytes)
    if size_bytes > tightest.free_bytes:
        raise ConfigError(
            f"the host pool needs {format_bytes(size_bytes)}, and "
            f"{format_bytes(max(0, tightest.free_bytes))} are free in {tightest.where}: "
            f"use fewer slots, or {tightest.remedy}"
        )


def prefault(mapping: mmap.mmap, fd: int | None) -> None:
    """Give every page of a mapping memory, in parallel and outside the interpreter lock.

    Bytes that are there stay as they are, also while other processes write.

    Args:
        mapping: of a new anonymous region, or of a file.
        fd: the file; None for an anonymous one.

    Raises:
        ConfigError: the memory is not there. Nothing has been killed by a SIGBUS.
    """
    address, size_bytes = _address_of(mapping), len(mapping)

    def populate(start: int) -> int:
        length = min(_STRETCH_BYTES, size_bytes - start)
        done = _libc.madvise(address + start, length, _MADV_POPULATE_WRITE)
        return ctypes.get_errno() if done else 0

    starts = range(0, size_bytes, _STRETCH_BYTES)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(starts))
    with ThreadPoolExecutor(threads, "kvtier-prefault") as executor:
        failures = {number for number in executor.map(populate, starts) if number}
    if errno.EINVAL in failures:
        _touch(mapping, fd)
    elif failures:
        # EFAULT stands for the SIGBUS that a touch would have been.
        raise _ran_out(size_bytes)


def reserve(fd: int, size_bytes: int) -> None:
    """Give every page of a file memory, without mapping any: a later touch cannot be a SIGBUS.

    Raises:
        ConfigError: the memory is not there.
    """
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise _ran_out(size_bytes) from error


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for transparent huge pages; before the pages are there."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def huge_page_bytes(mapping: mmap.mmap, *, shared: bool) -> int:
    """How much of a mapping lies in transparent huge pages.

    Args:
        mapping: any.
        shared: it is one of a file.
    """
    if len(mapping) < _HUGE_PAGE_BYTES or (shared and not _shmem_offers_huge_pages()):
        return 0
    begin = _address_of(mapping)
    end = begin + len(mapping)
    found = 0
    inside = False
    with contextlib.suppress(OSError), open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                first, _, last = word.partition("-")
                inside = int(first, 16) < end and int(last, 16) > begin
            elif inside and word in ("AnonHugePages:", "ShmemPmdMapped:"):
                found += int(rest.split()[0]) * 1024
    return min(found, len(mapping))


def _address_of(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _touch(mapping: mmap.mmap, fd: int | None) -> None:
    """Fault in a byte of every page, for kernels without MADV_POPULATE_WRITE."""
    pages = np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE]
    if fd is None:
        pages[:] = 0
    else:
        # A write could undo what another process writes there. Pages that are reserved are
        # mapped by a read as well.
        reserve(fd, len(mapping))
        pages.max()


def _ran_out(size_bytes: int) -> ConfigError:
    return ConfigError(
        f"the host pool's {format_bytes(size_bytes)} were free and were taken by others while it "
        "was made: use fewer slots, or end what else takes memory or /dev/shm"
    )


def _shmem_offers_huge_pages() -> bool:
    try:
        setting = _SHMEM_ENABLED.read_text(encoding="ascii")
    except OSError:
        return False
    return "[never]" not in setting and "[deny]" not in setting


def _room_of_machine() -> Room:
    free_bytes = meminfo_bytes("MemAvailable")
    return Room("this machine's memory", free_bytes, "end what else takes memory")


def _room_of_directory(directory: Path) -> Room:
    try:
        status = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(
            f"a shared host pool needs {directory}: {error.strerror}; mount a tmpfs there"
        ) from error
    remedy = "make it larger (docker run --shm-size, in Kubernetes an emptyDir of medium Memory)"
    return Room(str(directory), status.f_bavail * status.f_frsize, remedy)


def rooms_of_cgroups(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> Iterator[Room]:
    """What the memory limits above this process leave, as far as they can be read.

    Args:
        proc: where ``/proc`` is.
        cgroup_root: where control groups are mounted.
    """
    for limit in memory_limits(proc, cgroup_root):
        with contextlib.suppress(OSError):
            free_bytes = limit.limit_bytes - limit.used_bytes + cached_bytes(limit.directory)
            where = f"the memory limit of {limit.directory}"
            yield Room(where, free_bytes, "raise the limit of this container")
