"""Leases on an engine's file of shared memory, which count its processes and remove its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.pool_file import PoolFile, enter_named


class ReplicaLease:
    """One process's membership in the replica that shares a file.

    The last member that enters removes the file's name, which no process needs any more. Then the
    kernel frees the memory when the last process ends, in whatever way.

    The lease lasts until it is closed and the caller's own descriptor is closed too. Made by
    :meth:`enter`.
    """

    def __init__(self, file: PoolFile, worker: int | None) -> None:
        self._file = file
        self._worker = worker

    @classmethod
    def enter(cls, fd: int, path: str | Path, *, workers: int, worker: int | None) -> Self:
        """Become a member of a replica with a number of ``workers``.

        Args:
            fd: a descriptor of the file, which stays the caller's.
            path: the file's name, which the engine must no longer remove.
            worker: index of this process among the workers, from 0; ``None`` for the scheduler.

        Raises:
            ConfigError: another process is already this member, or every member has entered.
        """
        # The layout of the bytes is the engine's; only the number of workers matters here.
        file = enter_named(os.dup(fd), Path(path), PoolLayout(1, 1, workers), worker)
        if file is None:
            raise ConfigError(f"{path} has all its members: give each replica a different id")
        return cls(file, worker)

    def absent(self) -> list[str]:
        """Return the names of the members that have not entered; this one counts as entered."""
        return self._file.absent(self._worker)

    def close(self) -> None:
        """Close this lease's descriptor of the file; a second call does nothing."""
        self._file.close()
