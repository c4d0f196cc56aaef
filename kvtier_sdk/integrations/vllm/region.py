"""vLLM's shared memory with the leases of our host pool: who has it, and when its name goes.

vLLM leaves the name of this memory in /dev/shm until the process that made it ends in good order,
and does not say who has come.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.pool.pool_file import PoolFile, enter_named


class JoinedRegion(SharedOffloadRegion):  # type: ignore[misc]
    """vLLM's region as one member of a replica has it.

    Args:
        engine_id: the replica's.
        workers: how many workers it has.
        worker: which of them this is; ``None`` is the scheduler.
        geometry: what vLLM wants to know besides.

    Raises:
        ConfigError: another process is that member.
    """

    def __init__(self, engine_id: str, workers: int, worker: int | None, **geometry: Any) -> None:
        super().__init__(engine_id, **geometry)
        self._worker = worker
        try:
            self._file = enter(self, workers, worker)
        except BaseException:
            super().cleanup()
            raise

    def absent(self) -> list[str]:
        """Which members do not have it, in words; see :meth:`HostPool.absent`."""
        return self._file.absent(self._worker)

    def cleanup(self) -> None:
        """Give it back; vLLM's worker calls this."""
        super().cleanup()
        self._file.close()

    close = cleanup


def enter(region: SharedOffloadRegion, workers: int, worker: int | None) -> PoolFile:
    """Become a member of the replica that shares a region; the last to come removes its name.

    Nobody needs the name any more then, and the memory goes with the last process, however it ends.

    Args:
        region: as vLLM has made or opened it.
        workers: how many there are.
        worker: which of them this is; ``None`` is the scheduler.

    Returns:
        The lease, which lasts until both it and the region are closed.

    Raises:
        ConfigError: another process is that member.
    """
    # Whoever made the file, its name is not his to remove any more.
    region._creator = False
    path = Path(region.mmap_path)
    # Of what is in the file, no more is ours to say than who shares it.
    file = enter_named(os.dup(region.fd), path, PoolLayout(1, 1, workers), worker)
    if file is None:
        raise ConfigError(f"{path} has all its members: give each replica an id of its own")
    return file


def refuse_absent(absent: Sequence[str]) -> None:
    """Stop an engine whose scheduler is made, which vLLM does when all workers are there.

    Args:
        absent: who is not in the pool.

    Raises:
        ConfigError: somebody is not.
    """
    if absent:
        raise ConfigError(
            f"{', '.join(absent)} of this engine cannot be seen in its host pool: the scheduler "
            "and all workers of a replica must run on one machine, with one /dev/shm; the KV of a "
            "worker elsewhere would be stored as zeros"
        )
