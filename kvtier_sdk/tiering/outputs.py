"""The values that the manager returns to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier_sdk.types import OffloadKey


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The slots of a load's chunks.

    Attributes:
        slots: one slot index per key, in order.
        sources: the origin of each chunk for this request: the index of the tier that it was
            promoted from, or -1 if it was in the primary tier.
    """

    slots: list[int]
    sources: list[int]


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """The chunks to store, and their slots.

    Attributes:
        keys_to_store: the keys that are new and got a slot, in the order given.
        slots: one slot index for each of them.
        evicted_keys: chunks that left the primary tier to make room.
        rejected_keys: new keys for which there was no room.
    """

    keys_to_store: list[OffloadKey]
    slots: list[int]
    evicted_keys: list[OffloadKey]
    rejected_keys: list[OffloadKey]


class ResetScope(Enum):
    """The extent of a reset."""

    #: The primary tier; chunks in the secondary tiers are found again.
    PRIMARY = "primary"
    #: The secondary tiers too: no chunk that was stored before is found again.
    ALL = "all"


class MissReason(Enum):
    """The reason for a ``MISS``; the values are the labels under which misses are counted."""

    #: No tier has the chunk.
    ABSENT = "absent"
    #: A tier did not answer by the lookup deadline.
    TIMEOUT = "timeout"
    #: A tier that may have the chunk cannot be asked.
    UNAVAILABLE = "unavailable"
    #: A tier that may have the chunk failed to look it up.
    LOOKUP_FAILED = "lookup_failed"
    #: A tier has it, but failed to load it.
    LOAD_FAILED = "load_failed"
    #: A tier has the chunk, but the primary tier has no room.
    PRIMARY_FULL = "primary_full"
    #: A tier has it, but its queue of loads is full.
    QUEUE_FULL = "queue_full"
    #: A tier has it, but recomputing is faster than loading it.
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
