"""Whole objects between buffers and a file: no copies, short transfers continued, O_DIRECT."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence

from kvtier_sdk import CorruptChunkError


def ask_direct(fd: int) -> None:
    """Send a file's data past the page cache, where the file system lets us.

    ``fcntl`` instead of a flag of ``open``: an ``open`` that is refused for the flag may have
    made the file all the same.

    Args:
        fd: a regular file.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def is_direct(fd: int) -> bool:
    """Whether a file's data goes past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def write_from(fd: int, buffers: Iterable[memoryview]) -> None:
    """Write buffers one after the other, from the file's beginning.

    Args:
        fd: the file.
        buffers: format ``B``, contiguous; with O_DIRECT, aligned in address and length.

    Raises:
        OSError: they are not all written.
    """
    for moved_bytes in _moved(os.pwritev, fd, buffers):
        if moved_bytes == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


def read_into(fd: int, buffers: Iterable[memoryview]) -> None:
    """Fill buffers one after the other, from the file's beginning.

    Args:
        fd: the file.
        buffers: as for :func:`write_from`, and writable.

    Raises:
        CorruptChunkError: the file ends before the buffers do.
        OSError: they are not all filled.
    """
    for moved_bytes in _moved(os.preadv, fd, buffers):
        if moved_bytes == 0:
            raise CorruptChunkError("the file was truncated while it was read")


def _moved(
    move: Callable[[int, Sequence[memoryview], int], int], fd: int, buffers: Iterable[memoryview]
) -> Iterable[int]:
    """Repeat ``move`` until all buffers are through; yields the bytes of each step."""
    rest = [buffer for buffer in buffers if len(buffer)]
    offset = 0
    while rest:
        try:
            moved_bytes = move(fd, rest, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not is_direct(fd):
                raise
            # What a short transfer left, or this one file, does not suit O_DIRECT.
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            continue
        yield moved_bytes
        offset += moved_bytes
        while rest and moved_bytes >= len(rest[0]):
            moved_bytes -= len(rest.pop(0))
        if moved_bytes:
            rest[0] = rest[0][moved_bytes:]
