"""The files through which the processes of one root know of each other.

Layout below the root::

    .shared/control          the lock, the counters, and what each process was promised
    .shared/ledger           what was stored and removed, in order
    .shared/leases/<lease>   one for each process, locked for as long as it lives
"""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import WeakSet

from kvtier_file.control import ControlFile
from kvtier_file.directories import open_directory, open_file, opened_directory
from kvtier_file.leases import Leases
from kvtier_file.ledger import Ledger

_SHARED = ".shared"
_CONTROL = "control"
_LEDGER = "ledger"
_LEASES = "leases"

# A lock is held until the last copy of its descriptor is closed, and a fork makes copies.
_of_this_process: WeakSet[SharedFiles] = WeakSet()


class SharedFiles:
    """The files, opened; made where they are missing.

    Args:
        root_fd: the root.

    Attributes:
        control: the file with the lock.
        ledger: to be used under that lock.
        leases: the directory of leases.

    Raises:
        OSError: they cannot be made.
    """

    def __init__(self, root_fd: int) -> None:
        self._fds: list[int] = []
        try:
            with opened_directory(_SHARED, root_fd, create=True) as shared_fd:
                flags = os.O_RDWR | os.O_CREAT
                self._fds.append(open_file(_CONTROL, flags, shared_fd))
                self._fds.append(open_file(_LEDGER, flags, shared_fd))
                self._fds.append(open_directory(_LEASES, shared_fd, create=True))
        except OSError:
            self._close_fds()
            raise
        control_fd, ledger_fd, leases_fd = self._fds
        self.control = ControlFile(control_fd)
        self.ledger = Ledger(ledger_fd)
        self.leases = Leases(leases_fd)
        _of_this_process.add(self)

    def are_lost(self) -> bool:
        """Whether somebody removed one of them: who comes next would make another."""
        control_fd, ledger_fd, _ = self._fds
        # Whoever removes the directory of leases removes the lease in it first.
        return (
            os.fstat(control_fd).st_nlink == 0
            or os.fstat(ledger_fd).st_nlink == 0
            or self.leases.is_lost()
        )

    def close(self) -> None:
        """Close what is open, and with it end the lease."""
        self.leases.close()
        self._close_fds()

    def _close_fds(self) -> None:
        while self._fds:
            with suppress(OSError):
                os.close(self._fds.pop())


def _let_go() -> None:
    for files in list(_of_this_process):
        files.close()


os.register_at_fork(after_in_child=_let_go)
