"""Reads files into buffers and writes buffers to files, with O_DIRECT or the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvtier_sdk import CorruptChunkError

#: O_DIRECT needs addresses, offsets and lengths that are multiples of this.
ALIGNMENT = 4096


def has_direct_io(fd: int) -> bool:
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def take_over(fd: int, size_bytes: int) -> bool:
    """Truncate a regular, unshared file to at most ``size_bytes``; return false for other files."""
    status = os.fstat(fd)
    # A second link may belong to a copy of the root, and the copy must not change.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
        return False
    try:
        # If another process opens the file, the kernel sends SIGURG, which is ignored by default.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        # The kernel grants the lease only if nobody else has the file open.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        if status.st_size > size_bytes:
            os.ftruncate(fd, size_bytes)
    except OSError:
        return False
    return True


def write_buffers(fd: int, buffers: Iterable[memoryview]) -> None:
    _transfer(os.pwritev, fd, buffers, partial(OSError, errno.EIO, os.strerror(errno.EIO)))


def read_buffers(fd: int, buffers: Iterable[memoryview]) -> None:
    failure = partial(CorruptChunkError, "the file was truncated during the read")
    _transfer(os.preadv, fd, buffers, failure)


def _transfer(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Iterable[memoryview],
    failure: Callable[[], Exception],
) -> None:
    """Transfer all buffers with calls of ``move``; raise ``failure()`` if a call moves nothing."""
    rest = [buffer for buffer in buffers if len(buffer)]
    offset = 0
    while rest:
        try:
            moved_bytes = move(fd, rest, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not has_direct_io(fd):
                raise
            # O_DIRECT does not work for this file, or for unaligned buffers, so switch it off.
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            continue
        if moved_bytes == 0:
            raise failure()
        offset += moved_bytes
        while rest and moved_bytes >= len(rest[0]):
            moved_bytes -= len(rest.pop(0))
        if moved_bytes:
            rest[0] = rest[0][moved_bytes:]
