"""Leases on a pool's file: one lock for each process that has mapped the file.

A lease is a lock of an open file description (``F_OFD_SETLK``). The kernel releases the lease when
the last descriptor is closed, however the process ends. Leases also work between containers that
share the file. Each member locks one byte at its own offset; the byte's value has no meaning.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

#: ``struct flock``: type, whence, start, length, process (always 0 here).
_FLOCK = struct.Struct("hhqqi0q")
#: A process holds this lock while it joins or sweeps, so that only one checks the members at once.
_JOINING = 0
#: Processes that are not members, such as a child that does the I/O, share this lock.
_GUESTS = 1
_SCHEDULER = 2
_FIRST_WORKER = 3


def claim(fd: int, worker: int | None) -> bool:
    """Claim a member's lease until ``fd`` and its duplicates close; return false if it is taken."""
    return _try_lock(fd, _offset_of(worker), 1)


def claim_as_guest(fd: int) -> None:
    """Keep a file from being swept, without becoming a member."""
    _lock(fd, fcntl.F_OFD_SETLKW, fcntl.F_RDLCK, _GUESTS, 1)


def claim_whole(fd: int) -> bool:
    """Claim every lease, so that no process can join; return false if any lease is taken."""
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
