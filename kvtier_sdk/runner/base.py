"""What the manager sees of a runner, and what a runner sees of the host pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.jobs import Job, Report


class SlotMemory(Protocol):
    """The memory of the slots, as far as a runner needs it."""

    @property
    def chunk_bytes(self) -> int:
        """Payload of a slot."""

    def padded_view(self, slot: int, alignment: int, holder: str) -> memoryview:
        """A slot's payload, its length rounded up to ``alignment``, handed to ``holder``."""


class PoolMemory(SlotMemory, Protocol):
    """The same where a process of its own may be the runner: it maps the whole by descriptor."""

    @property
    def slots(self) -> int:
        """How many there are."""

    @property
    def layout(self) -> PoolLayout:
        """Where what lies."""

    @property
    def is_shared(self) -> bool:
        """Whether another process can map it."""

    @property
    def fd(self) -> int:
        """The descriptor, if so; it stays open as long as the memory does."""


class JobLoop(Protocol):
    """What a thread runner runs: a tier's loop, or what stands for one elsewhere."""

    async def open(self) -> None:
        """Open the tier; raises why it cannot be."""

    def submit(self, jobs: Sequence[Job]) -> None:
        """Take jobs. Called on the loop's thread."""

    async def drain(self, timeout_s: float) -> bool:
        """Cancel what is queued and wait for what runs; whether all of it ended in time."""

    async def close(self) -> None:
        """Close the tier; what is under way is cancelled, what comes later too."""

    def abandon(self) -> None:
        """Conclude every job as cancelled, and each that is handed over later."""


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
