"""The interfaces between a tier's client, its runner and the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.types import Region


class SlotMemory(Protocol):
    """The slots' memory, as a runner uses it."""

    @property
    def chunk_bytes(self) -> int:
        """Payload of a slot."""

    @property
    def region(self) -> Region:
        """All slots with their padding, at their address in this process."""

    def padded_view(self, slot: int, alignment: int, holder: str) -> memoryview:
        """Return a slot's payload, its length rounded up to ``alignment``, a power of two.

        A pool that closes logs its views still in use, each with its ``holder``.
        """


class PoolMemory(SlotMemory, Protocol):
    """Slots that a tier's process can map too, by descriptor."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def layout(self) -> PoolLayout:
        """Offsets and lengths in the mapping."""

    @property
    def is_shared(self) -> bool:
        """True if another process can map the memory."""

    @property
    def fd(self) -> int:
        """The shared memory's descriptor; open until the memory is closed."""


class TierRunner(Protocol):
    """Carries jobs to a tier and its reports back. Called on the engine's thread.

    The tier's client keeps the jobs, not the runner. Every submitted job ends in one
    :class:`~kvtier_sdk.runner.jobs.JobResult`, or in the ``RunnerStopped`` that ends all jobs.
    """

    def start(self) -> bool:
        """Open the tier, waiting at most ``open_deadline``; return true if it is open.

        Raises:
            Exception: the tier is required and did not open, or the error of ``open`` is permanent.
        """

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Hand over jobs in one hop, without waiting; return the results of refused ones."""

    def poll(self) -> Sequence[Report]:
        """Return the reports since the last call, without waiting."""

    def peek(self) -> Sequence[Report]:
        """Return the next :meth:`poll`'s reports and keep them. Any thread may call it."""

    def suspect(self) -> None:
        """Handle a job without a result after its deadline: the tier may block its loop."""

    def log_end(self, topic: str, message: str) -> bool:
        """Log held-back messages, then an outage's end; return false if the loop has ended."""

    def drain(self, timeout_s: float) -> bool:
        """Cancel queued batches and wait for running ones; return true if all have ended."""

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end; a second call does nothing."""
