"""The records of slots, lookups and live requests, which refer to each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from enum import Enum

from kvtier_sdk.types import GROUP_BYTES, OffloadKey, RequestContext

_UNKNOWN = (None, 0)


class SlotState(Enum):
    FREE = "free"
    #: The device is writing it (a store that is not complete).
    WRITING = "writing"
    #: A tier is writing it (a promotion).
    LOADING = "loading"
    #: Holds a readable chunk; evictable unless pinned.
    READY = "ready"
    #: Holds no chunk, but the holder of a pin may still read or write it.
    QUARANTINED = "quarantined"


class PendingLookup:
    """The chunks that one request looked up in one step, and the tiers' answers so far.

    Tiers are bits of a mask. Other requests that look up one of these chunks meanwhile share the
    pending lookup. Each tier's lookup job carries it as its tag, so a late answer reaches the
    lookup that it belongs to and never a later one.

    Attributes:
        waiting: tiers that have not answered.
        hits: by chunk, the tiers that have it and have not failed to load it: 0 if all of them
            have failed, no entry if no tier has it.
        deadline_s: clock time from which the missing answers of tiers count as misses; infinite
            until the tiers are asked.
        doubt: why a miss may be wrong: a tier could not be asked, or did not answer. The miss is
            counted under this reason.
        skipped: tiers that may have the chunks and could not be asked.
        sealed: true once it was handed over: no more keys are added.
        shared: true if the request may ask all tiers, so that other requests may use the answers.
        worth_loading: true if loading is faster than recomputing; ``None`` until decided.
        is_known: true if no tier is asked, because the tiers in ``hits`` are known to have the
            chunks. If they fail to load a chunk, the tiers are asked for it.
    """

    __slots__ = (
        "deadline_s",
        "doubt",
        "hits",
        "is_known",
        "keys",
        "request",
        "sealed",
        "shared",
        "skipped",
        "step",
        "waiting",
        "worth_loading",
    )

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
        """Return the index of the first of these tiers that has the chunk; there must be one."""
        mask = self.hits[key] & tiers
        return (mask & -mask).bit_length() - 1

    def run_from(self, key: OffloadKey, tier: int, limit: int) -> list[OffloadKey]:
        """Return the consecutive chunks from ``key`` on that ``tier`` is the first to have."""
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
        """Remove a tier from the hits of a chunk that it cannot load after all."""
        self.hits[key] &= ~(1 << tier)


class Promotion:
    """The promotion of one chunk.

    Attributes:
        waiters: while it is loading, the requests that wait for it.
        claims: number of requests that hold a pin on it and have not used it yet.
    """

    __slots__ = ("claims", "pending", "tier", "waiters")

    def __init__(self, pending: PendingLookup, tier: int, state: RequestState) -> None:
        self.pending = pending
        self.tier = tier
        self.waiters = [state]
        self.claims = 1


class Offers:
    """The tiers that were given one chunk. Tiers are bits of a mask.

    Attributes:
        hits: copies of it to the device since it came into the primary tier.
        sent: tiers that are known to have it, or that it was sent to.
        owed: tiers that must get it before it is evicted.
        failed: tiers that should have got it when it was stored, but did not.
        followers: by a tier's index, the request for which it gets the chunk once it is readable.
    """

    __slots__ = ("failed", "followers", "hits", "owed", "sent")

    def __init__(self) -> None:
        self.hits = 0
        self.sent = 0
        self.owed = 0
        self.failed = 0
        self.followers: dict[int, RequestContext] = {}


class Slot:
    """One slot. A plain record: the table and the manager keep it consistent.

    Attributes:
        key: the chunk in it, meaningless when free or quarantined.
        pins: references that forbid eviction and reuse: one for its writer, one for each copy to
            the device and each store into a tier, one for each claim.
        hit_step: the step in which a lookup last answered ``HIT`` for it; until that step ends
            it is not evicted, so that ``prepare_load`` finds it.
        used_s: time of the chunk's last store or use.
        copies: copies to the device that are under way.
        promotion: the chunk's promotion, while it is loading or claimed.
        offers: the tiers that the chunk was and will be offered to, if that is tracked.
        parent: the chunk before it in its prefix, if the policy uses that.
        position: its index in the prefix, likewise.
    """

    __slots__ = (
        "copies",
        "hit_step",
        "index",
        "key",
        "offers",
        "parent",
        "pins",
        "position",
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
        self.parent: OffloadKey | None = None
        self.position = 0


class PrefixOrder:
    """Parent and position of one request's chunks, learnt from the order in which they are named.

    An engine looks a prefix up from its start, again in each step, and stores it in order. The
    chunk named before a new one is its parent. Each KV-cache group is a prefix of its own.
    """

    __slots__ = ("_known", "_latest")

    def __init__(self) -> None:
        self._known: dict[OffloadKey, tuple[OffloadKey | None, int]] = {}
        self._latest: dict[bytes, OffloadKey] = {}

    @property
    def keys(self) -> Collection[OffloadKey]:
        return self._known.keys()

    def note(self, key: OffloadKey) -> tuple[OffloadKey | None, int]:
        """Record the next chunk that was named; return its parent and its position."""
        group = key[-GROUP_BYTES:]
        place = self._known.get(key)
        if place is None:
            parent = self._latest.get(group)
            place = (None, 0) if parent is None else (parent, self._known[parent][1] + 1)
            self._known[key] = place
        self._latest[group] = key
        return place


class NameOrder:
    """The chunks of one request, only in the order in which they were first named.

    It replaces a :class:`PrefixOrder` if the policy does not use parents and positions, at less
    than half of the cost.
    """

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys: dict[OffloadKey, None] = {}

    def note(self, key: OffloadKey) -> tuple[None, int]:
        self.keys[key] = None
        return _UNKNOWN


class Wait:
    """The pending answers that a request got in one step, and the changes that end its wait.

    Attributes:
        latest: the lookup that was added last.
        prefix: the first and the last chunk of the prefix that was looked up as a whole.
        hits: the number of its chunks from the start that were there or on their way.
        put_off: a chunk whose lookup begins once fewer others are pending.
        slot: the first slot on its way that a lookup found.
    """

    __slots__ = (
        "_key",
        "_lookups",
        "_state",
        "hits",
        "latest",
        "prefix",
        "put_off",
        "slot",
        "step",
    )

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
        """Watch the first chunk on its way: the request cannot go on before it has arrived."""
        self.slot, self._key, self._state = slot, slot.key, slot.state

    def is_over(self, now_s: float) -> bool:
        """Return true if a tier has answered, a deadline has passed, or the first slot changed."""
        slot = self.slot
        if slot is not None and (slot.state is not self._state or slot.key != self._key):
            return True
        for pending, waiting in self._lookups:
            if pending.waiting != waiting or now_s > pending.deadline_s:
                return True
        return False


class RequestState:
    """One request. A plain record, which is dropped as a whole when the request is over.

    Attributes:
        asked: the pending lookup of each chunk. Its answers never outlive the request.
        asking: the pending lookup that this step's new chunks are added to.
        known: the chunks of this step that are loaded without a lookup.
        asks_first: true once such a load could not begin: the tiers are asked for other chunks.
        claims: slots of chunks that are promoted for the request, pinned until it uses them or
            ends.
        copies: slots that are being copied to the device, by key; one entry for each copy.
        writes: slots that the device is writing, by key, in prefix order.
        prefix_order: the order of the request's chunks, if the policy or a trace needs it.
        arrived_s: clock time of its arrival, if a trace is recorded.
        tiers: mask of the tiers that may be asked for it; -1 for all.
        turn: the step in which its lookups may begin.
        wait: its latest wait; ``None`` if that is over.
        missed: the chunks whose miss was counted, so that each is counted once.
        finished: true once the engine is done with it; completions may still arrive.
    """

    __slots__ = (
        "arrived_s",
        "asked",
        "asking",
        "asks_first",
        "claims",
        "context",
        "copies",
        "finished",
        "known",
        "missed",
        "prefix_order",
        "tiers",
        "turn",
        "wait",
        "writes",
    )

    def __init__(
        self,
        context: RequestContext,
        prefix_order: PrefixOrder | NameOrder | None,
        tiers: int = -1,
        arrived_s: float = 0.0,
    ) -> None:
        self.context = context
        self.prefix_order = prefix_order
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

    @property
    def over(self) -> bool:
        """True if the request has finished and all its copies have ended."""
        return self.finished and not self.copies and not self.writes

    def wait_in(self, step: int) -> Wait:
        """Return the wait of this step's lookups, a new one if there is none."""
        wait = self.wait
        if wait is None or wait.step != step:
            self.wait = wait = Wait(step)
        return wait

    def held_slots(self) -> list[int]:
        """Return the slots that the request holds for copies to the device."""
        # Copies of the tables: another thread may call this while they change.
        held = [slot.index for slot in list(self.claims.values())] if self.claims else []
        if self.copies:
            held += [slot.index for copied in list(self.copies.values()) for slot in copied]
        return held

    def begin_copies(self, keys: Sequence[OffloadKey], slots: Sequence[Slot]) -> None:
        """Pin the slot of each chunk that is copied to the device."""
        copies = self.copies
        for key, slot in zip(keys, slots, strict=True):
            slot.pins += 1
            slot.copies += 1
            if key in copies:
                copies[key].append(slot)
            else:
                copies[key] = [slot]

    def end_copies(self, keys: Collection[OffloadKey]) -> list[Slot]:
        """Return the slots of ended copies, whose pins the caller releases."""
        copies = self.copies
        ended = []
        for key in keys:
            slots = copies.get(key)
            if slots is None:
                continue
            slot = slots.pop()
            if not slots:
                del copies[key]
            slot.copies -= 1
            ended.append(slot)
        return ended

    def start_over(self) -> list[Slot]:
        """Forget everything but the request itself; return the slots that copies still touch."""
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
