"""What the manager sees of a runner, and what a runner sees of the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier_sdk.jobs import Job, Report


class SlotMemory(Protocol):
    """The memory of the slots, as far as a runner needs it."""

    @property
    def chunk_bytes(self) -> int:
        """Payload of a slot."""

    def padded_view(self, slot: int, alignment: int, holder: str) -> memoryview:
        """A slot's payload, its length rounded up to ``alignment``, handed to ``holder``."""


class TierRunner(Protocol):
    """Runs one tier. Called on the engine's thread; no method waits unless it says so."""

    def start(self) -> None:
        """Open the tier; waits for it, and raises what ``open`` raised."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hand over jobs, all in one hop. Each ends in exactly one result."""

    def poll(self) -> Sequence[Report]:
        """Take what has been reported since the last call."""

    def drain(self, timeout_s: float) -> bool:
        """Cancel what is queued and wait for what runs; whether all of it ended in time."""

    def close(self, timeout_s: float) -> None:
        """Drain, close the tier and end; waits up to ``timeout_s``."""
