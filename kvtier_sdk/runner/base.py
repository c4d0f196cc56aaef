"""Interfaces between a tier's client, the tier's runner and the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.types import Region


class SlotMemory(Protocol):
    """The memory of the host pool, as a runner needs it."""

    @property
    def chunk_bytes(self) -> int:
        """Length of a slot's payload."""

    @property
    def region(self) -> Region:
        """The memory of all slots with their padding, as mapped in this process."""

    def padded_view(self, slot: int, alignment: int, holder: str) -> memoryview:
        """Return a slot's payload, its length rounded up to ``alignment``, a power of two.

        When the pool is closed, it logs the ``holder`` of each view that is still in use.
        """


class PoolMemory(SlotMemory, Protocol):
    """A pool whose slots another process can map through a file descriptor."""

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
        """Descriptor of the shared memory; open until the pool is closed."""


class TierRunner(Protocol):
    """Carries jobs to a tier, and reports back. The engine's thread calls the methods.

    Every submitted job ends in one :class:`~kvtier_sdk.runner.jobs.JobResult`, or in a
    ``RunnerStopped``, which ends all jobs. The tier's client keeps track of the jobs.
    """

    def start(self) -> bool:
        """Open the tier, waiting at most ``open_deadline``; return true if it is open.

        Raises:
            Exception: the tier is required and did not open, or the error is permanent.
        """

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Hand over jobs without waiting; return the results of refused jobs."""

    def poll(self) -> Sequence[Report]:
        """Return the reports since the last call, without waiting."""

    def peek(self) -> Sequence[Report]:
        """Return the new reports but keep them for :meth:`poll`. Any thread may call this."""

    def suspect(self) -> None:
        """Check whether the tier blocks its loop, because a job is overdue."""

    def log_end(self, topic: str, message: str) -> bool:
        """Log the end of an outage; return false if the tier's loop has ended."""

    def drain(self, timeout_s: float) -> bool:
        """Cancel queued batches and wait for running ones; return true if all have ended."""

    def close(self, timeout_s: float) -> None:
        """Drain and close the tier, and end its thread. A second call does nothing."""
