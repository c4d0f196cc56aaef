"""Leases of the processes that share an engine's memory file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.pool_file import PoolFile, enter_named


class ReplicaLease:
    """One process's membership in a replica; all members share a memory file.

    The last process to enter removes the file's name, because no other process needs the name.
    The kernel then frees the memory when the last process ends, even after a crash.

    :meth:`enter` makes a lease. Membership ends when the lease and the caller's own descriptor
    are both closed.
    """

    def __init__(self, file: PoolFile, worker: int | None) -> None:
        self._file = file
        self._worker = worker

    @classmethod
    def enter(cls, fd: int, path: str | Path, *, workers: int, worker: int | None) -> Self:
        """Enter a replica of one scheduler and a number of ``workers``.

        Args:
            fd: a descriptor of the file, which the caller still owns.
            path: the file's name, which the engine must not remove.
            worker: index of this process among the workers, from 0; ``None`` for the scheduler.

        Raises:
            ConfigError: another process has entered as this member, or all members have entered.
        """
        # Only the number of workers matters here, because the engine defines the memory's layout.
        file = enter_named(os.dup(fd), Path(path), PoolLayout(1, 1, workers), worker)
        if file is None:
            raise ConfigError(f"{path} has all its members: give each replica a different id")
        return cls(file, worker)

    def absent(self) -> list[str]:
        """Return the names of the members that have not entered yet."""
        return self._file.absent(self._worker)

    def close(self) -> None:
        """Close the lease's descriptor of the file; a second call does nothing."""
        self._file.close()
