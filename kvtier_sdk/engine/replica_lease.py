"""Leases on a memory file that the processes of an engine's replica share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.pool_file import PoolFile, enter_named


class ReplicaLease:
    """The membership of one process in a replica whose processes share a memory file.

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
        """Enter a replica that has one scheduler and as many workers as ``workers`` says.

        Args:
            fd: a descriptor of the file, which the caller still owns.
            path: the file's path, which the engine must not remove.
            worker: index of this process among the workers, from 0; ``None`` for the scheduler.

        Raises:
            ConfigError: another process has entered with this ``worker``, or all have entered.
        """
        # Only the number of workers matters here, because the engine defines the memory's layout.
        file = enter_named(os.dup(fd), Path(path), PoolLayout(1, 1, workers), worker)
        if file is None:
            raise ConfigError(f"{path} has all its members: give each replica a different id")
        return cls(file, worker)

    def absent(self) -> list[str]:
        """Return which of the scheduler and the workers have not entered, such as "worker 1"."""
        return self._file.absent(self._worker)

    def close(self) -> None:
        """Close the lease's descriptor of the file; a second call does nothing."""
        self._file.close()
