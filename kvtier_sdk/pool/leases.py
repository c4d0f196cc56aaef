"""Who holds a pool's file: one lock for each process that has mapped it.

These are locks of open file descriptions (``F_OFD_SETLK``): the kernel gives them back when the
last descriptor is closed, however its process ends, and they hold between containers that share the
file. The bytes that are locked mean nothing; they are numbers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

#: ``struct flock``: type, whence, start, length, process (always 0 here).
_FLOCK = struct.Struct("hhqqi0q")
#: Held for a moment by whoever joins, so that one at a time sees who is there.
_GATE = 0
#: Shared by those that are no member, such as a child that does the I/O.
_GUESTS = 1
_SCHEDULER = 2
_FIRST_WORKER = 3


def number_of(worker: int | None) -> int:
    """The number of a member: a worker, or with None the scheduler."""
    return _SCHEDULER if worker is None else _FIRST_WORKER + worker


def _lock(fd: int, command: int, kind: int, start: int, length: int) -> int:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    answer: int = _FLOCK.unpack(fcntl.fcntl(fd, command, request))[0]
    return answer


def claim(fd: int, worker: int | None) -> bool:
    """Be that member until the descriptor and all its duplicates are closed.

    Returns:
        False if somebody else is.
    """
    return _try_lock(fd, number_of(worker), 1)


def claim_as_guest(fd: int) -> None:
    """Keep a file from being swept, without being a member."""
    _lock(fd, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, _GUESTS, 1)


def claim_whole(fd: int) -> bool:
    """Hold a file alone; nobody can join it meanwhile.

    Returns:
        False if somebody else holds it.
    """
    return _try_lock(fd, 0, 0)


def is_claimed(fd: int, worker: int | None) -> bool:
    """Whether another process, or another opening in this one, is that member."""
    held = _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, number_of(worker), 1)
    return held != fcntl.F_UNLCK


@contextmanager
def gate(fd: int) -> Iterator[None]:
    """Wait until nobody else is joining or sweeping this file, and keep others from it."""
    _lock(fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, _GATE, 1)
    try:
        yield
    finally:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _GATE, 1)


def _try_lock(fd: int, start: int, length: int) -> bool:
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, start, length)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
