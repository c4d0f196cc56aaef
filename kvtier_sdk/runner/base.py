"""The interface between a tier's runner and the host pool."""

from __future__ import annotations

from typing import Protocol

from kvtier_sdk.pool import PoolLayout
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
