"""Maps a host pool's pages before an engine touches them, as huge pages if possible."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.types import Region

#: Linux has had this advice since 5.14. Python's ``mmap`` lacks the constant, and holds the
#: interpreter lock during ``madvise``, so this module calls the C library instead.
_MADV_POPULATE_WRITE = 23
#: Each call of ``madvise`` faults in this many bytes.
_STRETCH_BYTES = 64 << 20
_MAX_THREADS = 16

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def prefault(mapping: mmap.mmap, fd: int | None) -> None:
    """Allocate every page without changing a byte; raise ConfigError if memory runs out."""
    address, size_bytes = Region.of(mapping).address, len(mapping)

    def populate(start: int) -> int:
        length = min(_STRETCH_BYTES, size_bytes - start)
        done = _libc.madvise(address + start, length, _MADV_POPULATE_WRITE)
        return ctypes.get_errno() if done else 0

    starts = range(0, size_bytes, _STRETCH_BYTES)
    threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)), len(starts))
    with ThreadPoolExecutor(threads, "kvtier-prefault") as executor:
        failures = {number for number in executor.map(populate, starts) if number}
    if errno.EINVAL in failures:
        # Kernels before 5.14 refuse the advice. They map each page on first use instead.
        if fd is not None:
            reserve(fd, size_bytes)
    elif failures:
        # EFAULT: the kernel has no memory for a page. Touching the page would cause a SIGBUS.
        raise _out_of_memory(size_bytes)


def reserve(fd: int, size_bytes: int) -> None:
    """Allocate all pages of a file without mapping them, so that no later access can fail."""
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        raise _out_of_memory(size_bytes) from error


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Request huge pages before any page is touched; the kernel's settings may refuse them."""
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def _out_of_memory(size_bytes: int) -> ConfigError:
    return ConfigError(
        f"the host pool's {format_bytes(size_bytes)} were free, but other processes took them "
        "while it was made: make the pool smaller, or end what else uses memory or /dev/shm"
    )
