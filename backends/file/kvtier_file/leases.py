"""Leases: a process holds a lock for as long as it lives, and what it leaves behind names it.

A lease is a file with a lock (``flock``), which the operating system lets go of however the process
ends. Unlike a process number, it can be asked from another container, and nobody else's lease
takes its name.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress

from kvtier_file.directories import open_file, opened_file

_LEASE = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = re.compile(r"([0-9a-f]{16})-\d+\.tmp")


class Leases:
    """The lease files in one directory, one of them this object's own.

    Args:
        directory_fd: the directory, open for as long as this object is used.
    """

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._fd: int | None = None

    def acquire(self, name: str) -> None:
        """Make the own lease. Until it is locked it looks like a dead one's.

        Args:
            name: from :func:`new_lease`.
        """
        self._fd = open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._directory_fd)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self, name: str) -> None:
        """End the own lease, if there is one."""
        if self._fd is not None:
            with suppress(OSError):  # the lock goes with the descriptor, and that matters
                self.remove(name)
            self.close()

    def close(self) -> None:
        """Close the own lease, and leave its file behind."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held(self, name: str) -> bool:
        """Whether the lease's process lives, this one included."""
        try:
            with opened_file(name, os.O_RDWR, self._directory_fd) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def is_lost(self) -> bool:
        """Whether somebody removed the own lease, so that this process passes for dead."""
        return self._fd is not None and os.fstat(self._fd).st_nlink == 0

    def names(self) -> list[str]:
        """All leases, of the living and the dead."""
        return [name for name in os.listdir(self._directory_fd) if _LEASE.fullmatch(name)]

    def remove(self, name: str) -> None:
        """Remove a lease whose process has ended."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory_fd)


class TemporaryNames:
    """Names for files that are being written, which nobody else uses.

    Args:
        lease: the writer's.
    """

    def __init__(self, lease: str) -> None:
        self._lease = lease
        self._counter = itertools.count()

    def new(self) -> str:
        """A name that was never used. Callable from any thread."""
        return f"{self._lease}-{next(self._counter)}.tmp"


def new_lease() -> str:
    """A name that no lease has had."""
    return os.urandom(8).hex()


def stale(names: Iterable[str], is_held: Callable[[str], bool]) -> list[str]:
    """Pick out the temporaries that nobody is writing any more.

    Args:
        names: what lies in a directory of temporaries; those that are none are left out.
        is_held: whether a lease's process lives.

    Returns:
        The names whose writer has ended.
    """
    held: dict[str, bool] = {}
    found = []
    for name in names:
        match = _TEMPORARY.fullmatch(name)
        if match is None:
            continue
        lease = match[1]
        if lease not in held:
            held[lease] = is_held(lease)
        if not held[lease]:
            found.append(name)
    return found
