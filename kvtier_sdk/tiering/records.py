"""The records of slots and of the requests that are alive, which refer to each other."""

from __future__ import annotations

from enum import Enum

from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.prefix_order import NameOrder, PrefixOrder
from kvtier_sdk.types import OffloadKey, RequestContext


class SlotState(Enum):
    """The state of a slot."""

    FREE = "free"
    #: The device is writing it (a store that is not complete).
    WRITING = "writing"
    #: A tier is writing it (a promotion).
    LOADING = "loading"
    #: Holds a readable chunk; evictable unless pinned.
    READY = "ready"
    #: Holds no chunk, but the holder of a pin may still read or write it.
    QUARANTINED = "quarantined"


class Promotion:
    """The promotion of one chunk.

    Attributes:
        pending: the lookup that found the chunk.
        tier: index of the tier that loads it.
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
        index: its place in the pool.
        key: the chunk in it, meaningless when free or quarantined.
        state: its current state.
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

    def __init__(self, index: int) -> None:
        self.index = index
        self.key: OffloadKey = b""
        self.state: SlotState = SlotState.FREE
        self.pins = 0
        self.hit_step = -1
        self.used_s = 0.0
        self.copies = 0
        self.promotion: Promotion | None = None
        self.offers: Offers | None = None
        self.parent: OffloadKey | None = None
        self.position = 0


class Wait:
    """The pending answers that a request got in one step, and the changes that end its wait.

    Attributes:
        step: the step.
        latest: the lookup that was added last.
        prefix: the first and the last chunk of the prefix that was looked up as a whole.
        hits: the number of its chunks from the start that were there or on their way.
        put_off: a chunk whose lookup begins once fewer others are pending.
    """

    __slots__ = (
        "_key",
        "_lookups",
        "_slot",
        "_state",
        "hits",
        "latest",
        "prefix",
        "put_off",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.latest: PendingLookup | None = None
        self.prefix: tuple[OffloadKey, OffloadKey] | None = None
        self.hits = 0
        self.put_off: OffloadKey | None = None
        self._lookups: list[tuple[PendingLookup, int]] = []
        self._slot: Slot | None = None
        self._key: OffloadKey = b""
        self._state = SlotState.FREE

    def note_lookup(self, pending: PendingLookup) -> None:
        """Add a lookup that awaits answers."""
        self.latest = pending
        self._lookups.append((pending, pending.waiting))

    def note_slot(self, slot: Slot) -> None:
        """Watch the first chunk on its way: the request cannot go on before it has arrived."""
        if self._slot is None:
            self._slot, self._key, self._state = slot, slot.key, slot.state

    def is_over(self, now_s: float) -> bool:
        """Return true if a tier has answered, a deadline has passed, or the first slot changed."""
        slot = self._slot
        if slot is not None and (slot.state is not self._state or slot.key != self._key):
            return True
        for pending, waiting in self._lookups:
            if pending.waiting != waiting or now_s > pending.deadline_s:
                return True
        return False


class RequestState:
    """One request. A plain record, which is dropped as a whole when the request is over.

    Attributes:
        context: the context that the engine gave.
        asked: the pending lookup of each chunk. Its answers never outlive the request.
        asking: the pending lookup that this step's new chunks are added to.
        known: the chunks of this step that are loaded without a lookup.
        asks_first: true if no more chunks are, because the load of one could not begin.
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
        *,
        tiers: int = -1,
        arrived_s: float = 0.0,
    ) -> None:
        self.context = context
        self.tiers = tiers
        self.turn = -1
        self.asked: dict[OffloadKey, PendingLookup] = {}
        self.asking: PendingLookup | None = None
        self.known: PendingLookup | None = None
        self.asks_first = False
        self.claims: dict[OffloadKey, Slot] = {}
        self.copies: dict[OffloadKey, list[Slot]] = {}
        self.writes: dict[OffloadKey, Slot] = {}
        self.prefix_order = prefix_order
        self.arrived_s = arrived_s
        self.wait: Wait | None = None
        self.missed: set[OffloadKey] = set()
        self.finished = False

    @property
    def over(self) -> bool:
        """True if the request has finished and all its copies have ended."""
        return self.finished and not self.copies and not self.writes

    def wait_in(self, step: int) -> Wait:
        """Return the wait of this step's lookups, a new one if there is none."""
        if self.wait is None or self.wait.step != step:
            self.wait = Wait(step)
        return self.wait

    def held_slots(self) -> list[int]:
        """Return the slots that the request holds for copies to the device."""
        # Copies of the tables: another thread may call this while they change.
        held = [slot.index for slot in list(self.claims.values())] if self.claims else []
        if self.copies:
            held += [slot.index for copied in list(self.copies.values()) for slot in copied]
        return held

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
        """Forget the tiers' answers so far."""
        self.asked.clear()
        self.asking = None
        self.wait = None
        self.known = None
        self.asks_first = False
