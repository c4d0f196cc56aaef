"""Adds leases to vLLM's shared memory, to find absent members and to remove the memory's name.

vLLM removes the name from /dev/shm only when the process that created the memory exits normally,
and does not record which processes have mapped the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier_sdk import ConfigError
from kvtier_sdk.engine import PoolFile


class JoinedRegion(SharedOffloadRegion):  # type: ignore[misc]
    """vLLM's region, mapped by one member of a replica: a worker or the scheduler."""

    def __init__(self, engine_id: str, workers: int, worker: int | None, **geometry: Any) -> None:
        super().__init__(engine_id, **geometry)
        try:
            self._lease = enter(self, workers, worker)
        except BaseException:
            super().cleanup()
            raise

    def absent(self) -> list[str]:
        return self._lease.absent()

    def cleanup(self) -> None:
        """Release the region and leave the replica. vLLM's worker calls this method."""
        super().cleanup()
        self._lease.close()

    close = cleanup


def enter(region: SharedOffloadRegion, workers: int, worker: int | None) -> PoolFile:
    """Join the replica that shares a region; the last member to join removes the region's name."""
    # Unset this flag, so that vLLM does not remove the name when the creator exits.
    region._creator = False
    return PoolFile.enter(region.fd, region.mmap_path, workers=workers, worker=worker)


def refuse_absent(absent: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if a process of the engine has not mapped the host pool."""
    # vLLM makes the scheduler after all workers, so every worker must have joined by now.
    if absent:
        raise ConfigError(
            f"{', '.join(absent)} of this engine cannot be seen in its host pool: the scheduler "
            "and all workers of a replica must run on one machine, with one /dev/shm; the KV of a "
            "worker elsewhere would be stored as zeros"
        )
