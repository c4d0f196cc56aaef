"""The interfaces between a tier's client, its runner and the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.jobs import Job, JobResult, Report
from kvtier_sdk.types import Region


class SlotMemory(Protocol):
    """The memory of the slots, as far as a runner needs it."""

    @property
    def chunk_bytes(self) -> int:
        """Payload of a slot."""

    @property
    def region(self) -> Region:
        """All slots with their padding, at the address that they have in this process."""

    def padded_view(self, slot: int, alignment: int, holder: str) -> memoryview:
        """Return a slot's payload, its length rounded up to ``alignment``.

        Args:
            slot: the slot's index.
            alignment: in bytes, a power of two.
            holder: the name under which the pool notes the view.
        """


class PoolMemory(SlotMemory, Protocol):
    """Slots that a process of a tier can map too, by descriptor."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def layout(self) -> PoolLayout:
        """Offsets and lengths in the mapping."""

    @property
    def is_shared(self) -> bool:
        """True if another process can map it."""

    @property
    def fd(self) -> int:
        """The descriptor, if it is shared; open as long as the memory is."""


class TierRunner(Protocol):
    """Carries jobs to a tier and its reports back. Called on the engine's thread.

    A runner keeps no job: the tier's client does. Every job that :meth:`submit` takes ends in one
    :class:`~kvtier_sdk.runner.jobs.JobResult`, or in the ``RunnerStopped`` that ends them all.
    """

    def start(self) -> bool:
        """Open the tier, and wait for it, but no longer than ``open_deadline``.

        Raises:
            Exception: it is required, or what ``open`` raised does not pass by itself.
        """

    def submit(self, jobs: Sequence[Job]) -> Sequence[JobResult]:
        """Hand over jobs in one hop, without a wait."""

    def poll(self) -> Sequence[Report]:
        """Take the reports since the last call, without a wait."""

    def peek(self) -> Sequence[Report]:
        """Return the reports that the next :meth:`poll` takes. Any thread may call it."""

    def suspect(self) -> None:
        """Note that a job outlived its deadline without a result: the tier may block its loop."""

    def log_end(self, topic: str, message: str) -> bool:
        """Have the tier's loop log the end of an outage, after what it held back of that."""

    def drain(self, timeout_s: float) -> bool:
        """Cancel what is queued and wait for what runs; return true if all of it has ended."""

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end; a second call does nothing."""
