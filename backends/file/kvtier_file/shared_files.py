"""The files through which the processes of one root coordinate.

Layout below the root::

    .shared/header           the lock, the counters and the reservations
    .shared/ledger           every store and removal, in order
    .shared/leases/<lease>   one for each process, locked while it lives
"""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import WeakSet

from kvtier_file.directories import ClosingFd, Directories, open_file
from kvtier_file.leases import Leases
from kvtier_file.ledger import Ledger
from kvtier_file.shared_header import HeaderFile

#: Name of the directory that holds these files.
SHARED = ".shared"
_HEADER = "header"
_LEDGER = "ledger"
_LEASES = "leases"

# Closed in a forked child: a lock is held until the last copy of its descriptor is closed.
_of_this_process: WeakSet[SharedFiles] = WeakSet()


class SharedFiles:
    """The shared files, opened; missing files are made.

    Attributes:
        header: the file with the lock.
        ledger: the ledger, used under that lock.
        leases: the directory of leases.

    Raises:
        OSError: a file cannot be opened or made.
    """

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
        """Return true if a file was removed, so that other processes would make a new one."""
        header_fd, ledger_fd, _ = self._fds
        # The directory of leases cannot be removed before the lease in it.
        return (
            os.fstat(header_fd).st_nlink == 0
            or os.fstat(ledger_fd).st_nlink == 0
            or self.leases.is_lost()
        )

    def close(self) -> None:
        """Close the files, which ends the lease."""
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
