"""Leases on a pool's file. A lease shows that a process still uses the file.

A lease is a lock of an open file description (``F_OFD_SETLK``). The kernel releases the lease when
the last descriptor is closed, even if the process is killed. Leases also work between containers
that share the file. Each member, the scheduler or a worker, locks the byte at its own offset.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

#: ``struct flock``: type, whence, start, length, and the process, which must be 0.
_FLOCK = struct.Struct("hhqqi0q")
#: Offset of the lock for joining and sweeping. Only one process may join or sweep at a time.
_JOINING = 0
#: Offset of the lock that guests share. A child process that does a tier's I/O is a guest.
_GUESTS = 1
_SCHEDULER = 2
_FIRST_WORKER = 3


def claim(fd: int, worker: int | None) -> bool:
    """Claim a member's lease; return false if another process holds the lease."""
    return _try_lock(fd, _offset_of(worker), 1)


def claim_as_guest(fd: int) -> None:
    """Prevent a sweep from removing the file, without becoming a member."""
    _lock(fd, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, _GUESTS, 1)


def claim_whole(fd: int) -> bool:
    """Claim every lease, so that no process can join; return false if a lease is taken."""
    return _try_lock(fd, 0, 0)


def is_claimed(fd: int, worker: int | None) -> bool:
    """Return true if another open file description holds this member's lease."""
    held = _lock(fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, _offset_of(worker), 1)
    return held != fcntl.F_UNLCK


@contextmanager
def joining(fd: int) -> Iterator[None]:
    """Keep other processes from joining or sweeping the file during the ``with`` block."""
    _lock(fd, fcntl.F_OFD_SETLKW, fcntl.F_WRLCK, _JOINING, 1)
    try:
        yield
    finally:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _JOINING, 1)


def _offset_of(worker: int | None) -> int:
    return _SCHEDULER if worker is None else _FIRST_WORKER + worker


def _try_lock(fd: int, start: int, length: int) -> bool:
    try:
        _lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, start, length)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _lock(fd: int, command: int, kind: int, start: int, length: int) -> int:
    request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
    answer: int = _FLOCK.unpack(fcntl.fcntl(fd, command, request))[0]
    return answer
