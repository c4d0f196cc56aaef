"""vLLM's shared memory with the leases of a host pool, which count members and remove its name.

vLLM itself leaves the name of this memory in /dev/shm until the process that made it exits
normally, and does not tell which processes have mapped it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

from kvtier_sdk import ConfigError
from kvtier_sdk.engine import ReplicaLease


class JoinedRegion(SharedOffloadRegion):  # type: ignore[misc]
    """vLLM's region, mapped by one member of a replica; without a worker, it is the scheduler."""

    def __init__(self, engine_id: str, workers: int, worker: int | None, **geometry: Any) -> None:
        super().__init__(engine_id, **geometry)
        try:
            self._lease = enter(self, workers, worker)
        except BaseException:
            super().cleanup()
            raise

    def absent(self) -> list[str]:
        """Name the members that have not mapped the region; see :meth:`HostPool.absent`."""
        return self._lease.absent()

    def cleanup(self) -> None:
        """Release the region, as vLLM's worker does."""
        super().cleanup()
        self._lease.close()

    close = cleanup


def enter(region: SharedOffloadRegion, workers: int, worker: int | None) -> ReplicaLease:
    """Become a member of the replica that shares a region; the last member removes its name."""
    # From now on the last member removes the name, not the process that made the file.
    region._creator = False
    return ReplicaLease.enter(region.fd, region.mmap_path, workers=workers, worker=worker)


def refuse_absent(absent: Sequence[str]) -> None:
    """Refuse to start an engine if any of its processes is absent from its host pool."""
    # vLLM makes the scheduler after all workers, so every worker must be there by then.
    if absent:
        raise ConfigError(
            f"{', '.join(absent)} of this engine cannot be seen in its host pool: the scheduler "
            "and all workers of a replica must run on one machine, with one /dev/shm; the KV of a "
            "worker elsewhere would be stored as zeros"
        )
