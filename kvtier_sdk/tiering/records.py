"""The records of slots, lookups and live requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.types import OffloadKey, RequestContext

_BYTES: Final = frozenset([bytes])


class SlotState(Enum):
    FREE = "free"
    #: The device is writing a chunk into the slot (a store).
    WRITING = "writing"
    #: A tier is writing a chunk into the slot (a promotion).
    LOADING = "loading"
    #: The slot holds a readable chunk, which can be evicted unless the slot is pinned.
    READY = "ready"
    #: The slot holds no chunk, but the holder of a pin may still read or write the slot.
    QUARANTINED = "quarantined"


def check_keys(keys: Iterable[OffloadKey]) -> None:
    if not _BYTES.issuperset(map(type, keys)):
        kind = next(type(key) for key in keys if type(key) is not bytes)
        raise KVTierError(f"a chunk's key is a {kind.__name__}; it should be bytes")


class PendingLookup:
    """The chunks that one request looked up in one step, and the tiers' answers so far.

    A set of tiers is a bit mask. Other requests that need one of these chunks share the pending
    lookup. Each tier's job has the lookup as its tag, so that a late answer reaches this lookup and
    not a later lookup of the same chunk.

    Attributes:
        waiting: tiers that have not answered.
        hits: maps each chunk to the tiers that have the chunk and have not failed to load it. The
            mask is 0 once all of them have failed. A chunk that no tier has is not in the mapping.
        deadline_s: clock time after which a missing answer counts as a miss; infinite until the
            tiers are asked.
        doubt: the reason to record for a miss, if some tier could not be asked or has failed to
            answer; otherwise ``None``.
        skipped: tiers that may have the chunks and could not be asked.
        sealed: true once the lookup is handed to the tiers, after which no chunks are added.
        shared: true if the request may ask all tiers, so that other requests may use the answers.
        worth_loading: true if loading is faster than recomputing; ``None`` until decided.
        is_known: true if no tier is asked, because the tiers in ``hits`` are known to have the
            chunks. If the load of a chunk fails, the tiers are asked for the chunk.
    """

    def __init__(self, request: RequestContext, waiting: int, step: int, shared: bool) -> None:
        self.request = request
        self.waiting = waiting
        self.step = step
        self.shared = shared
        self.keys: list[OffloadKey] = []
        self.hits: dict[OffloadKey, int] = {}
        self.deadline_s = math.inf
        self.doubt: str | None = None
        self.skipped = 0
        self.sealed = False
        self.worth_loading: bool | None = None
        self.is_known = False

    def first_hit(self, key: OffloadKey, tiers: int) -> int:
        """Return the index of the first tier in ``tiers`` that has the chunk; one must exist."""
        mask = self.hits[key] & tiers
        return (mask & -mask).bit_length() - 1

    def run_from(self, key: OffloadKey, tier: int, limit: int) -> list[OffloadKey]:
        """Return up to ``limit`` chunks from ``key`` on, while ``tier`` is their first tier."""
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
        """Remove a tier from the tiers that have a chunk."""
        self.hits[key] &= ~(1 << tier)


class Promotion:
    """The load of one chunk into the primary tier.

    Attributes:
        waiters: the requests that wait for the load; empty once the chunk is loaded.
        claims: number of requests that pin the slot and have not used the chunk yet.
    """

    def __init__(self, pending: PendingLookup, tier: int, state: RequestState) -> None:
        self.pending = pending
        self.tier = tier
        self.waiters = [state]
        self.claims = 1


class Offers:
    """The tiers to which one chunk was sent or must be sent. A set of tiers is a bit mask.

    Attributes:
        hits: number of copies to the device since the chunk came into the primary tier.
        sent: tiers that have the chunk or are storing it.
        owed: tiers that must get the chunk before its eviction.
        failed: write-through tiers that did not get the chunk; a later hit offers it again.
        followers: maps a tier's index to a request. Once the chunk is readable, the tier gets the
            chunk for this request.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.sent = 0
        self.owed = 0
        self.failed = 0
        self.followers: dict[int, RequestContext] = {}


class Slot:
    """A record of one slot of the primary tier.

    Attributes:
        key: the key of the slot's chunk; meaningless in a free or quarantined slot.
        pins: number of uses that prevent eviction and reuse: one for the writer, and one for each
            copy to the device, each store into a tier, and each request's claim.
        hit_step: the step in which a lookup last answered ``HIT`` for the chunk. The chunk is not
            evicted before this step ends, so that ``prepare_load`` finds the chunk.
        used_s: time of the chunk's last store or use.
        copies: number of running copies to the device.
        promotion: the chunk's promotion, while the chunk is loading or claimed.
        offers: the tiers to which the chunk was sent or must be sent, if the cascade records them.
        note: what routers are told of the chunk's blocks, if the engine has said it.
    """

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
        self.key = key
        self.state: SlotState = SlotState.FREE
        self.pins = 0
        self.hit_step = -1
        self.used_s = 0.0
        self.copies = 0
        self.promotion: Promotion | None = None
        self.offers: Offers | None = None
        self.note = b""


class Wait:
    """The lookups and loads that one request waits for.

    Attributes:
        latest: the pending lookup that was recorded last.
        prefix: the first and the last chunk, if a whole prefix was looked up.
        hits: number of chunks before the prefix's first miss that were present or loading.
        put_off: a chunk whose lookup begins once fewer other lookups are pending.
        slot: the first slot in which a lookup found a chunk that is not readable yet.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.latest: PendingLookup | None = None
        self.prefix: tuple[OffloadKey, OffloadKey] | None = None
        self.hits = 0
        self.put_off: OffloadKey | None = None
        self._lookups: list[tuple[PendingLookup, int]] = []
        self.slot: Slot | None = None
        self._key: OffloadKey = b""
        self._state: SlotState = SlotState.FREE

    def note_lookup(self, pending: PendingLookup) -> None:
        self.latest = pending
        self._lookups.append((pending, pending.waiting))

    def note_slot(self, slot: Slot) -> None:
        """Record the first slot whose chunk is not readable; a change of the slot ends the wait."""
        self.slot, self._key, self._state = slot, slot.key, slot.state

    def is_over(self, now_s: float) -> bool:
        """Return true if a tier has answered, a deadline has passed, or the slot has changed."""
        slot = self.slot
        if slot is not None and (slot.state is not self._state or slot.key != self._key):
            return True
        for pending, waiting in self._lookups:
            if pending.waiting != waiting or now_s > pending.deadline_s:
                return True
        return False


class RequestState:
    """A record of one live request.

    Attributes:
        asked: the pending lookup of each chunk.
        asking: the pending lookup to which the new chunks of this step are added.
        known: a pending lookup that asks no tier; its chunks are loaded at the end of the step.
        asks_first: true once a load without a lookup could not begin; from then on the tiers are
            asked before each load.
        claims: slots of chunks that are promoted for the request, pinned until the request uses
            the chunks or ends.
        copies: maps each chunk to the slots of its running copies to the device.
        writes: maps each chunk that the device is writing to its slot, in prefix order.
        named: the chunks in the order of their first lookup or store, if a trace is recorded or
            the caller has named a session or given hints.
        arrived_s: clock time of the request's arrival, if a trace is recorded.
        tiers: mask of the tiers that the request may ask; -1 for all.
        turn: the last step in which the request was allowed to begin lookups; -1 at first.
        wait: the request's latest wait; ``None`` if the wait is over.
        missed: the chunks whose miss was counted, so that each miss is counted once.
        finished: true once the engine has ended the request; copies and stores may still run.
        stop: why the answer ended, once the engine has ended the request and if it knows.
        is_prefetch: true if no request needs the chunks yet, so that misses are not counted.
    """

    def __init__(
        self,
        context: RequestContext,
        named: dict[OffloadKey, None] | None,
        tiers: int = -1,
        arrived_s: float = 0.0,
    ) -> None:
        self.context = context
        self.named = named
        self.tiers = tiers
        self.arrived_s = arrived_s
        self.turn = -1
        self.asked: dict[OffloadKey, PendingLookup] = {}
        self.asking: PendingLookup | None = None
        self.known: PendingLookup | None = None
        self.asks_first = False
        self.claims: dict[OffloadKey, Slot] = {}
        self.copies: dict[OffloadKey, list[Slot]] = {}
        self.writes: dict[OffloadKey, Slot] = {}
        self.wait: Wait | None = None
        self.missed: set[OffloadKey] = set()
        self.finished = False
        self.stop: str | None = None
        self.is_prefetch = False

    @property
    def over(self) -> bool:
        return self.finished and not self.copies and not self.writes

    def wait_in(self, step: int) -> Wait:
        if self.wait is None or self.wait.step != step:
            self.wait = Wait(step)
        return self.wait

    def held_slots(self) -> list[int]:
        """Return the slots that the request has claimed or is copying to the device."""
        # Any thread may call this, so copy the tables, which the engine's thread may change.
        held = [slot.index for slot in list(self.claims.values())] if self.claims else []
        if self.copies:
            held += [slot.index for copied in list(self.copies.values()) for slot in copied]
        return held

    def begin_copies(self, keys: Sequence[OffloadKey], slots: Sequence[Slot]) -> None:
        copies = self.copies
        for key, slot in zip(keys, slots, strict=True):
            slot.pins += 1
            slot.copies += 1
            if key in copies:
                copies[key].append(slot)
            else:
                copies[key] = [slot]

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
