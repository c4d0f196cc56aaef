"""The shared files that coordinate a root's processes.

Layout below the root::

    .shared/header           the lock, the counters and the reservations
    .shared/ledger           every store and removal, in order
    .shared/leases/<lease>   a file for each process, locked while the process lives

A lease is a file that its process keeps locked (``flock``). The lease's name marks the process's
temporary files and reservations. The lock is released when the process ends, even if it is killed.
Unlike a process id, a lease can be checked from another container, and its name is never reused.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import suppress
from weakref import WeakSet

from kvtier_file.directories import ClosingFd, Directories, open_file
from kvtier_file.errors import absence_ignored
from kvtier_file.ledger import Ledger
from kvtier_file.shared_header import HeaderFile

SHARED = ".shared"
_HEADER = "header"
_LEDGER = "ledger"
_LEASES = "leases"
_LEASE = re.compile(r"[0-9a-f]{16}")


class Leases:
    """The lease files in one directory; this process owns one of them."""

    def __init__(self, directory_fd: int) -> None:
        self._directory_fd = directory_fd
        self._fd: int | None = None

    def acquire(self, name: str) -> None:
        """Create and lock this process's lease. Until it is locked, the process looks dead."""
        self._fd = open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._directory_fd)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self, name: str) -> None:
        if self._fd is not None:
            with suppress(OSError):  # closing releases the lock even if the file remains
                self.remove(name)
            self.close()

    def close(self) -> None:
        """Close this process's lease; its file remains."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def is_held(self, name: str) -> bool:
        """Return true if the process that owns the lease is alive."""
        try:
            flags = os.O_RDWR
            with absence_ignored(), ClosingFd(open_file(name, flags, self._directory_fd)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def is_lost(self) -> bool:
        """Return true if this process's lease was removed, which makes the process look dead."""
        return self._fd is not None and os.fstat(self._fd).st_nlink == 0

    def names(self) -> list[str]:
        with os.scandir(self._directory_fd) as entries:
            return [
                entry.name
                for entry in entries
                if _LEASE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            ]

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(name, dir_fd=self._directory_fd)


def new_lease() -> str:
    return os.urandom(8).hex()


# A forked child closes its copies of these files, because they would keep the lease locked.
_of_this_process: WeakSet[SharedFiles] = WeakSet()


class SharedFiles:
    """The open shared files. Missing files are created."""

    def __init__(self, root_fd: int, directories: Directories) -> None:
        self._fds: list[int] = []
        try:
            with ClosingFd(directories.open(SHARED, root_fd, create=True)) as shared_fd:
                flags = os.O_RDWR | os.O_CREAT
                self._fds.append(open_file(_HEADER, flags, shared_fd))
                self._fds.append(open_file(_LEDGER, flags, shared_fd))
                self._fds.append(directories.open(_LEASES, shared_fd, create=True))
        except OSError:
            self._close_fds()
            raise
        header_fd, ledger_fd, leases_fd = self._fds
        self.header = HeaderFile(header_fd)
        self.ledger = Ledger(ledger_fd)
        self.leases = Leases(leases_fd)
        _of_this_process.add(self)

    def are_lost(self) -> bool:
        """Return true if a file was removed. Other processes then use a new file."""
        header_fd, ledger_fd, _ = self._fds
        # The directory of leases needs no check: it cannot be removed while it contains the lease.
        return (
            os.fstat(header_fd).st_nlink == 0
            or os.fstat(ledger_fd).st_nlink == 0
            or self.leases.is_lost()
        )

    def close(self) -> None:
        self.leases.close()
        self._close_fds()

    def _close_fds(self) -> None:
        while self._fds:
            with suppress(OSError):
                os.close(self._fds.pop())


def _close_in_child() -> None:
    for files in list(_of_this_process):
        files.close()


os.register_at_fork(after_in_child=_close_in_child)
