"""Types of the manager's interface: its results, reset scopes, and reasons for a miss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtier_sdk.types import OffloadKey


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """The slots from which the engine copies chunks to the device.

    Attributes:
        slots: one slot index per key, in order.
        sources: for each chunk, the index of its source tier if it was promoted for this request;
            -1 if it was already in the primary tier.
    """

    slots: list[int]
    sources: list[int]


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """The chunks to store, and their slots.

    Attributes:
        keys_to_store: the new keys that got a slot, in the given order.
        slots: one slot index for each key in ``keys_to_store``.
        evicted_keys: keys of chunks that the primary tier evicted to make room.
        rejected_keys: new keys that got no slot, because the primary tier had no room.
    """

    keys_to_store: list[OffloadKey]
    slots: list[int]
    evicted_keys: list[OffloadKey]
    rejected_keys: list[OffloadKey]


class ResetScope(Enum):
    """The tiers that a reset empties."""

    #: Only the primary tier; chunks in the secondary tiers can still be found.
    PRIMARY = "primary"
    #: The primary and the secondary tiers; no chunk stored before the reset is found again.
    ALL = "all"


class MissReason(Enum):
    """The reason for a ``MISS``; each value is a label in the metric of misses."""

    #: No tier has the chunk.
    ABSENT = "absent"
    #: A tier did not answer by the lookup deadline.
    TIMEOUT = "timeout"
    #: A tier that may have the chunk is unavailable.
    UNAVAILABLE = "unavailable"
    #: The lookup failed in a tier that may have the chunk.
    LOOKUP_FAILED = "lookup_failed"
    #: A tier has the chunk, but failed to load it.
    LOAD_FAILED = "load_failed"
    #: A tier has the chunk, but the primary tier has no room.
    PRIMARY_FULL = "primary_full"
    #: A tier has the chunk, but the tier's queue of loads is full.
    QUEUE_FULL = "queue_full"
    #: A tier has the chunk, but recomputing it is faster than loading it.
    SLOWER_THAN_RECOMPUTE = "slower_than_recompute"
