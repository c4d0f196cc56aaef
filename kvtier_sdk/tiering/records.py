"""The records of slots, lookups and live requests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.types import OffloadKey, RequestContext

_BYTES: Final = frozenset([bytes])


class SlotState(Enum):
    FREE = "free"
    WRITING = "writing"  # the device is writing a chunk into the slot (a store)
    LOADING = "loading"  # a tier is writing a chunk into the slot (a promotion)
    READY = "ready"  # the slot holds a readable chunk, which can be evicted unless it is pinned
    QUARANTINED = "quarantined"  # without a chunk, but the holder of a pin may still use the slot


def check_keys(keys: Iterable[OffloadKey]) -> None:
    if not _BYTES.issuperset(map(type, keys)):
        kind = next(type(key) for key in keys if type(key) is not bytes)
        raise KVTierError(f"a chunk's key is a {kind.__name__}; it should be bytes")


class PendingLookup:
    """The chunks that one request looked up in one step, and the tiers' answers so far.

    A bit mask represents a set of tiers. Other requests that need one of these chunks share the
    lookup. The lookup is the tag of each tier's job, so a late answer cannot reach a later lookup.
    """

    def __init__(self, request: RequestContext, waiting: int, step: int, shared: bool) -> None:
        self.request = request
        self.waiting = waiting  # tiers that have not answered
        self.step = step
        self.shared = shared  # true if the request may ask all tiers, so others may use the answers
        self.keys: list[OffloadKey] = []
        # Maps each found chunk to the tiers that have it and have not failed to load it.
        self.hits: dict[OffloadKey, int] = {}
        self.deadline_s = math.inf  # of the tiers' answers; infinite until the tiers are asked
        # The reason for a miss, if a tier could not be asked or failed to answer.
        self.doubt: str | None = None
        self.skipped = 0  # tiers that may have the chunks and could not be asked
        self.sealed = False  # true once the tiers are asked, after which no chunks are added
        self.worth_loading: bool | None = None  # ``None`` until decided
        # True if no lookup is needed, because the tiers in ``hits`` are known to have the chunks.
        # If the load of a chunk fails, a lookup follows.
        self.is_known = False

    def first_hit(self, key: OffloadKey, tiers: int) -> int:
        """Return the index of the first tier in ``tiers`` that has the chunk."""
        mask = self.hits[key] & tiers
        return (mask & -mask).bit_length() - 1

    def run_from(self, key: OffloadKey, tier: int, limit: int) -> list[OffloadKey]:
        """Return up to ``limit`` successive chunks from ``key`` on, whose first hit is ``tier``."""
        hits, bit = self.hits, 1 << tier
        before = bit - 1
        start = self.keys.index(key)
        run = []
        for found in self.keys[start : start + limit]:
            mask = hits.get(found, 0)
            if not mask & bit or mask & before:
                break
            run.append(found)
        return run

    def strike(self, key: OffloadKey, tier: int) -> None:
        self.hits[key] &= ~(1 << tier)


class Promotion:
    """The load of one chunk into the primary tier."""

    def __init__(self, pending: PendingLookup, tier: int, state: RequestState) -> None:
        self.pending = pending
        self.tier = tier
        self.waiters = [state]  # empty once the chunk is loaded
        self.claims = 1  # requests that pin the slot and have not used the chunk yet


class Offers:
    """Bit masks of the tiers to which one chunk was sent or must be sent."""

    def __init__(self) -> None:
        self.hits = 0  # copies to the device since the chunk came into the primary tier
        self.sent = 0  # tiers that have the chunk or are storing it
        self.owed = 0  # tiers that must get the chunk before its eviction
        self.failed = 0  # write-through tiers that lack the chunk, so a later hit offers it again
        # Maps the index of each tier that waits for the chunk to the request that used the chunk.
        self.followers: dict[int, RequestContext] = {}


class Slot:
    __slots__ = (
        "copies",
        "hit_step",
        "index",
        "key",
        "note",
        "offers",
        "pins",
        "promotion",
        "state",
        "used_s",
    )

    def __init__(self, index: int, key: OffloadKey = b"") -> None:
        self.index = index
        self.key = key  # meaningless in a free or quarantined slot
        self.state: SlotState = SlotState.FREE
        self.pins = 0  # held by the writer, device copies, stores into tiers, and claims
        # The step of the last ``HIT``. ``prepare_load`` must find the chunk until this step ends.
        self.hit_step = -1
        self.used_s = 0.0
        self.copies = 0  # running copies to the device
        self.promotion: Promotion | None = None  # while the chunk is loading or claimed
        self.offers: Offers | None = None  # if the cascade records them
        self.note = b""  # the engine's description of the chunk's blocks, for routers


class Wait:
    """The lookups and loads that one request waits for."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.latest: PendingLookup | None = None
        self.prefix: tuple[OffloadKey, OffloadKey] | None = None  # its first and last chunk
        self.hits = 0  # present or loading chunks before the prefix's first miss
        self.put_off: OffloadKey | None = None  # to be looked up once fewer lookups are pending
        self._lookups: list[tuple[PendingLookup, int]] = []
        # The first slot with an unreadable chunk. A new key or state of the slot ends the wait.
        self.slot: Slot | None = None
        self.key: OffloadKey = b""
        self.state: SlotState = SlotState.FREE

    def note_lookup(self, pending: PendingLookup) -> None:
        self.latest = pending
        self._lookups.append((pending, pending.waiting))

    def is_over(self, now_s: float) -> bool:
        slot = self.slot
        if slot is not None and (slot.state is not self.state or slot.key != self.key):
            return True
        for pending, waiting in self._lookups:
            if pending.waiting != waiting or now_s > pending.deadline_s:
                return True
        return False


@dataclass(eq=False)
class RequestState:
    context: RequestContext
    # The chunks in the order of their first lookup or store; for traces, sessions and hints.
    named: dict[OffloadKey, None] | None
    tiers: int = -1  # mask of the tiers that the request may ask; -1 for all
    arrived_s: float = 0.0  # for the trace
    is_prefetch: bool = False  # no request needs the chunks yet, so misses are not counted
    turn: int = -1  # the last step in which the request was allowed to begin lookups
    asked: dict[OffloadKey, PendingLookup] = field(default_factory=dict)
    asking: PendingLookup | None = None  # gets the chunks newly looked up in this step
    known: PendingLookup | None = None  # asks no tier; its loads begin at the step's end
    # True if a load without a lookup could not begin. Later loads then need lookups.
    asks_first: bool = False
    # Slots of chunks promoted for the request, pinned until the request uses them or ends.
    claims: dict[OffloadKey, Slot] = field(default_factory=dict)
    copies: dict[OffloadKey, list[Slot]] = field(default_factory=dict)  # running, to the device
    writes: dict[OffloadKey, Slot] = field(default_factory=dict)  # by the device, in prefix order
    wait: Wait | None = None
    missed: set[OffloadKey] = field(default_factory=set)  # so that each miss is counted once
    finished: bool = False  # true once the engine has ended it; its copies may still run
    stop: str | None = None  # why the answer ended, if the engine knows

    @property
    def over(self) -> bool:
        return self.finished and not self.copies and not self.writes

    def wait_in(self, step: int) -> Wait:
        if self.wait is None or self.wait.step != step:
            self.wait = Wait(step)
        return self.wait

    def held_slots(self) -> list[int]:
        """Return the slots that the request has claimed or is copying to the device."""
        # Copy the tables, because the engine's thread may change them during this call.
        held = [slot.index for slot in list(self.claims.values())]
        return held + [slot.index for copied in list(self.copies.values()) for slot in copied]

    def start_over(self) -> list[Slot]:
        """Forget all chunks; return the slots that the device may still read or write."""
        touched = [slot for copied in self.copies.values() for slot in copied]
        touched += self.writes.values()
        self.copies.clear()
        self.writes.clear()
        self.claims.clear()
        self.forget_answers()
        return touched

    def forget_answers(self) -> None:
        self.asked.clear()
        self.asking = None
        self.wait = None
        self.known = None
        self.asks_first = False
