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

    The last member that enters removes the file's name. From then on no process needs the name,
    and the kernel frees the memory with the last process, however that ends.

    The lease lasts until it is closed and the caller's own descriptor is closed too. Made by
    :meth:`enter`.
    """

    def __init__(self, file: PoolFile, worker: int | None) -> None:
        self._file = file
        self._worker = worker

    @classmethod
    def enter(cls, fd: int, path: str | Path, *, workers: int, worker: int | None) -> Self:
        """Become a member.

        Args:
            fd: a descriptor of the file, which stays the caller's.
            path: the file's name. The engine must not remove it itself from now on.
            workers: number of workers of the replica.
            worker: the member that this process is, from 0; ``None`` is the scheduler.

        Raises:
            ConfigError: another process is this member, or all members have entered before.
        """
        # The layout of the bytes is the engine's; only the number of workers matters here.
        file = enter_named(os.dup(fd), Path(path), PoolLayout(1, 1, workers), worker)
        if file is None:
            raise ConfigError(f"{path} has all its members: give each replica a different id")
        return cls(file, worker)

    def absent(self) -> list[str]:
        """Name the members that have not entered; this one counts as there."""
        return self._file.absent(self._worker)

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        self._file.close()
