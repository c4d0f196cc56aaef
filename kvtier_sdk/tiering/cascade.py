"""The way down: which readable chunk goes to which tier, and when."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.contract import StoreMoment
from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.slots import PrimaryTier, Slot, SlotState
from kvtier_sdk.tiering.tier_port import NOBODY, TierPort
from kvtier_sdk.types import RequestContext

_OK = Verdict.OK
_READY = SlotState.READY


class Offers:
    """What the tiers have been given of one chunk. Tiers are bits of a mask.

    Attributes:
        hits: copies of it to the device since it came into the primary tier.
        sent: tiers that are known to have it or to have been handed it.
        owed: tiers that get it before it may be evicted.
        followers: tiers and requests that get it once it is readable.
    """

    __slots__ = ("followers", "hits", "owed", "sent")

    def __init__(self) -> None:
        self.hits = 0
        self.sent = 0
        self.owed = 0
        self.followers: list[tuple[TierPort, RequestContext]] = []


class Cascade:
    """Hands readable chunks to the tiers, each by its store policy.

    Every chunk that a tier is given holds a pin until the tier has done with it. A chunk that
    goes to a tier when it leaves the primary one is *owed* to it: it cannot be evicted before.
    So that room is there when it is needed, a headroom of free slots is kept by a cadence of its
    own, at the end of each step.

    Attributes:
        headroom_slots: how many slots are kept free where a tier is owed what is evicted.
        tracks: whether what was offered is kept track of; for plain writing through it is not.

    Args:
        primary: the slot table.
        headroom_slots: how many slots to keep free where a tier is owed what is evicted.
    """

    def __init__(self, primary: PrimaryTier, headroom_slots: int) -> None:
        self._primary = primary
        self.headroom_slots = max(1, headroom_slots)
        self._on_store: list[TierPort] = []
        self._on_hit: list[TierPort] = []
        self._on_evict: list[TierPort] = []
        self._whole: list[TierPort] = []
        self._owed_mask = 0
        # Slots that were asked for and not there since the last step ended.
        self._missing = 0
        self.tracks = False

    def add(self, port: TierPort) -> None:
        """Take a tier in."""
        by_moment = {
            StoreMoment.STORED: self._on_store,
            StoreMoment.HIT: self._on_hit,
            StoreMoment.EVICTED: self._on_evict,
        }
        by_moment[port.store_policy.moment].append(port)
        if port.store_policy.moment is StoreMoment.EVICTED:
            self._owed_mask |= port.bit
        if port.whole_requests:
            self._whole.append(port)
        self.tracks = bool(self._on_hit or self._on_evict or self._whole)

    @property
    def behind(self) -> bool:
        """Whether chunks should leave to make room, and were not sent on their way yet."""
        return bool(self._on_evict) and self._missing > 0

    def stored(self, slots: Sequence[Slot], request: RequestContext) -> None:
        """Chunks that the device wrote have become readable.

        Args:
            slots: theirs, in prefix order.
            request: who stored them.
        """
        for port in self._on_store:
            self._offer(port, slots, request)
        if self.tracks:
            for slot in slots:
                self._offers(slot).owed = self._owed_mask
            self._serve_followers(slots)

    def landed(self, slots: Sequence[Slot]) -> None:
        """Chunks that were promoted have become readable: they go to no tier that has them.

        Args:
            slots: theirs; each still knows the answers that its load rested on.
        """
        if self.tracks:
            for slot in slots:
                offers = self._offers(slot)
                offers.sent = slot.promotion.question.hits[slot.key]
                offers.owed = self._owed_mask & ~offers.sent
            self._serve_followers(slots)

    def used(self, slots: Sequence[Slot], request: RequestContext) -> None:
        """Chunks are being copied to the device once more.

        Args:
            slots: theirs.
            request: for whom.
        """
        if not self.tracks:
            return
        for slot in slots:
            self._offers(slot).hits += 1
        for port in self._on_hit:
            fresh = [slot for slot in slots if not slot.offers.sent & port.bit]
            self._offer(port, fresh, request)
        self.include(slots, request)

    def include(self, slots: Sequence[Slot], request: RequestContext) -> None:
        """A request names chunks that are in the primary tier already, or on their way to it.

        Tiers that want whole requests get them too: at once, or as soon as they are readable.

        Args:
            slots: theirs, in prefix order.
            request: whose.
        """
        for port in self._whole:
            self._send(port, [slot for slot in slots if slot.state is _READY], request)
            for slot in slots:
                if slot.state is not _READY:
                    self._offers(slot).followers.append((port, request))

    def note_missing(self, slot_count: int) -> None:
        """So many slots were asked for and could not be had."""
        self._missing = max(self._missing, slot_count)

    def keep_headroom(self) -> None:
        """Send chunks that will be evicted next to the tiers they are owed to; evict the others."""
        if not self._on_evict:
            return
        shortage = max(self.headroom_slots, self._missing)
        # Whatever such a tier is being given can be evicted once it has it.
        shortage -= self._primary.free_slots + max(port.stores for port in self._on_evict)
        self._missing = 0
        if shortage <= 0:
            return
        by_key = self._primary.by_key
        victims = [by_key[key] for key in self._primary.victims(shortage, owed=True)]
        for port in self._on_evict:
            owed = [slot for slot in victims if slot.offers.owed & port.bit]
            if not port.takes_stores:
                # What cannot be written now is let go: a tier that is down must not fill the pool.
                port.drop_stores(len(owed))
                for slot in owed:
                    slot.offers.owed &= ~port.bit
            else:
                self._offer(port, owed[: port.store_room], NOBODY)
        self._primary.evict(
            [slot.key for slot in victims if not slot.offers.owed and not slot.pins]
        )

    def settled(self, port: TierPort, job: Job, verdicts: Sequence[Verdict]) -> None:
        """A store has been concluded: well or not, the chunks are owed to the tier no more.

        Args:
            port: the tier.
            job: the store.
            verdicts: one a chunk; what has failed counts as never sent, and is offered again
                where its moment returns.
        """
        if not self.tracks:
            return
        for index, verdict in zip(job.slots, verdicts, strict=True):
            offers = self._primary.slots[index].offers
            # A slot whose chunk was forgotten by a reset meanwhile has none.
            if offers is not None:
                offers.owed &= ~port.bit
                if verdict is not _OK:
                    offers.sent &= ~port.bit

    def forget(self) -> None:
        """The primary tier has been emptied."""
        self._missing = 0

    def _offer(self, port: TierPort, slots: Sequence[Slot], request: RequestContext) -> None:
        """Send those chunks that the tier's policy wants."""
        policy = port.store_policy
        if policy.filters:
            wanted = []
            for slot in slots:
                offers = slot.offers
                hits = 0 if offers is None else offers.hits
                if policy.wants(slot.key, hits, request):
                    wanted.append(slot)
                elif offers is not None:
                    offers.owed &= ~port.bit
            slots = wanted
        self._send(port, slots, request)

    def _send(self, port: TierPort, slots: Sequence[Slot], request: RequestContext) -> None:
        if not slots:
            return
        taken = port.store([slot.key for slot in slots], [slot.index for slot in slots], request)
        for slot in slots[:taken]:
            slot.pins += 1
        if self.tracks:
            for slot in slots[:taken]:
                self._offers(slot).sent |= port.bit

    def _offers(self, slot: Slot) -> Offers:
        if slot.offers is None:
            slot.offers = Offers()
        offers: Offers = slot.offers
        return offers

    def _serve_followers(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            for port, request in slot.offers.followers:
                self._send(port, [slot], request)
            slot.offers.followers.clear()
