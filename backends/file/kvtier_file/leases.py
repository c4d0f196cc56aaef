"""Leases: each process holds one while it lives, and marks its files and reservations with it.

A lease is a file with a lock (``flock``). The operating system releases the lock however the
process ends. Unlike a process id, a lease can be checked from another container, and its name
is never used again.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress

from kvtier_file.directories import ClosingFd, open_file
from kvtier_file.errors import ABSENT

_LEASE = re.compile(r"[0-9a-f]{16}")


class Leases:
    """The lease files in one directory; this process owns one of them."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._fd: int | None = None

    def acquire(self, name: str) -> None:
        """Make and lock this process's lease. Until it is locked, the process looks dead."""
        self._fd = open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._directory_fd)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self, name: str) -> None:
        """Close this process's lease, if there is one, and remove its file."""
        if self._fd is not None:
            with suppress(OSError):  # closing releases the lock, and that is what matters
                self.remove(name)
            self.close()

    def close(self) -> None:
        """Close this process's lease; its file remains."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held(self, name: str) -> bool:
        """Return true if the lease's process lives; it may be this process."""
        try:
            with ClosingFd(open_file(name, os.O_RDWR, self._directory_fd)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            if error.errno not in ABSENT:
                raise
        return False

    def is_lost(self) -> bool:
        """Return true if this process's lease was removed, so that the process looks dead."""
        return self._fd is not None and os.fstat(self._fd).st_nlink == 0

    def names(self) -> list[str]:
        """Return the names of all leases, of living and dead processes."""
        with os.scandir(self._directory_fd) as entries:
            return [
                entry.name
                for entry in entries
                if _LEASE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]

    def remove(self, name: str) -> None:
        """Remove the lease of a process that has ended."""
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self._directory_fd)


def new_lease() -> str:
    """Return a new, unique lease name."""
    return os.urandom(8).hex()
