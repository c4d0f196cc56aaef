"""Interfaces between a tier's client, the tier's runner and the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.types import Region


class PoolMemory(Protocol):
    """The part of the host pool's interface that runners need."""

    @property
    def chunk_bytes(self) -> int:
        """Length of a slot's payload, in bytes."""

    @property
    def region(self) -> Region:
        """The memory of all slots with their padding, as mapped in this process."""

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        """Return a slot's payload, extended to a multiple of ``alignment``, a power of two."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def layout(self) -> PoolLayout:
        """Offsets and lengths of the slots in the mapping."""

    @property
    def is_shared(self) -> bool:
        """True if another process can map the memory."""

    @property
    def fd(self) -> int:
        """The shared memory's file descriptor, which stays open until the pool is closed."""


class TierRunner(Protocol):
    """Runs a tier's jobs. Only the engine's thread may call it, except where noted.

    The runner reports one :class:`~kvtier_sdk.runner.jobs.JobResult` per submitted job. If the
    tier's loop or process ends, one ``RunnerStopped`` report replaces all missing results.
    """

    def start(self) -> bool:
        """Open the tier, or begin to open it in the background; return true if it is open now."""

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Submit jobs without waiting; return the results of refused jobs."""

    def poll(self) -> Sequence[Report]:
        """Return the reports since the last call, without waiting."""

    def peek(self) -> Sequence[Report]:
        """Return the new reports but keep them for :meth:`poll`. Any thread may call this."""

    def suspect(self) -> None:
        """Check whether the tier blocks its loop. The client calls this when a job is overdue."""

    def options_changed(self) -> None:
        """Pass changed live options to the tier's loop. Any thread may call this."""

    def log_end(self, topic: str, message: str) -> bool:
        """Log the end of an outage in the tier's loop; return false if the loop is unreachable."""

    def drain(self, timeout_s: float) -> bool:
        """Cancel queued batches, and wait for running batches; return true if all have ended."""

    def close(self, timeout_s: float) -> None:
        """Drain and close the tier, and end its thread. A second call does nothing."""
