"""Sends readable chunks from the primary tier to the secondary tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtier_sdk.contract import StoreMoment, StorePolicy
from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.admission import Admission
from kvtier_sdk.tiering.records import Offers, Slot, SlotState
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.tiering.tier_client import NO_REQUEST, TierClient
from kvtier_sdk.types import OffloadKey, RequestContext

_OK: Final = Verdict.OK
_READY: Final = SlotState.READY


class ManagedTier:
    def __init__(self, client: TierClient, index: int, store_policy: StorePolicy) -> None:
        self.client = client
        self.index = index
        self.bit = 1 << index
        self.store_policy = store_policy
        options = client.spec.runner
        self.whole_requests = options.offload_policy == "request"
        # Do not limit chunks with hits (they were seen before) or whole requests (never split).
        is_open = store_policy.moment is not StoreMoment.HIT and not self.whole_requests
        self.admission = Admission(client.stats, client.log, options if is_open else None)

    def admit(self, slots: Sequence[Slot]) -> tuple[Sequence[Slot], Sequence[Slot]]:
        chosen, others = self.admission.choose(slots)
        if others:
            self.client.losses.note([slot.key for slot in others], "not_admitted")
        return chosen, others


class Cascade:
    """Sends readable chunks to each tier according to the tier's store policy.

    A chunk is pinned while a tier stores it. A chunk that a tier stores just before eviction is
    *owed* to the tier, and cannot be evicted until the store ends. Each step therefore ends by
    freeing some slots for the next chunks from the device.

    While a chunk stays in the primary tier, it is sent to each tier once. A failed store or a
    reported removal allows another attempt.
    """

    def __init__(self, primary: PrimaryTier, headroom_slots: int) -> None:
        self._primary = primary
        self.headroom_slots = max(1, headroom_slots)
        self._on_store: list[ManagedTier] = []
        self._on_hit: list[ManagedTier] = []
        self._on_evict: list[ManagedTier] = []
        self._whole: list[ManagedTier] = []
        self._tiers: list[ManagedTier] = []
        self._owed_mask = 0
        self._stored_mask = 0
        self._has_failed = False  # true from the first chunk that a write-through tier did not get
        self.missing = 0  # the most slots that a store has lacked since the last step ended
        # False if every tier gets each chunk as soon as it is written. Offers then need no record.
        self.tracks = False

    def add(self, tier: ManagedTier) -> None:
        self._tiers.append(tier)
        moment = tier.store_policy.moment
        if moment is StoreMoment.STORED:
            self._on_store.append(tier)
            self._stored_mask |= tier.bit
        elif moment is StoreMoment.EVICTED:
            self._on_evict.append(tier)
            self._owed_mask |= tier.bit
        else:
            self._on_hit.append(tier)
        if tier.whole_requests:
            self._whole.append(tier)
        self.tracks = bool(self._on_hit or self._on_evict or self._whole)

    @property
    def behind(self) -> bool:
        """True if the device's stores have lacked slots since the last step ended."""
        return bool(self._on_evict) and self.missing > 0

    def lacked_room(self, keys: Sequence[OffloadKey]) -> None:
        self.missing = max(self.missing, len(keys))
        for tier in self._tiers:
            tier.client.losses.note(keys, "store.primary_full")

    def stored(self, slots: Sequence[Slot], request: RequestContext) -> None:
        if request.is_over:
            for slot in slots:
                # No later turn needs the chunk. Mark it, so that another request's use stores it.
                self._note_failed(slot, self._stored_mask)
        else:
            for tier in self._on_store:
                chosen, others = tier.admit(slots)
                for slot in others:
                    self._note_failed(slot, tier.bit)
                self._offer(tier, chosen, request)
            if self.tracks:
                for slot in slots:
                    self._offers(slot).owed = self._owed_mask
            for tier in self._on_evict:
                for slot in tier.admit(slots)[1]:
                    self._offers(slot).owed &= ~tier.bit
        if self.tracks:
            self._serve_followers(slots)

    def landed(self, slots: Sequence[Slot]) -> None:
        """Record promoted chunks, and send each chunk to the tiers that wait for it."""
        for slot in slots:
            promotion = slot.promotion
            assert promotion is not None
            self._tiers[promotion.tier].admission.read(slot.key)
            if self.tracks:
                offers = self._offers(slot)
                offers.sent = promotion.pending.hits[slot.key]
                offers.owed = self._owed_mask & ~offers.sent
        if self.tracks:
            self._serve_followers(slots)

    def used(self, slots: Sequence[Slot], sources: Sequence[int], request: RequestContext) -> None:
        for tier in self._tiers:
            tier.admission.used(slots, (source == tier.index for source in sources))
        if request.is_over:
            return
        if self._has_failed:
            for tier in self._on_store:
                self._offer(tier, self._take_failed(tier, slots), request)
        if not self.tracks:
            return
        for slot in slots:
            self._offers(slot).hits += 1
        for tier in self._on_evict:
            for slot in self._unsent(tier, slots):
                self._offers(slot).owed |= tier.bit
        for tier in self._on_hit:
            self._offer(tier, self._unsent(tier, slots), request)
        self.include(slots, request)

    def include(self, slots: Sequence[Slot], request: RequestContext) -> None:
        """Send chunks to the tiers that store whole requests, once the chunks are readable."""
        for tier in self._whole:
            unsent = self._unsent(tier, slots)
            self._send(tier, [slot for slot in unsent if slot.state is _READY], request)
            for slot in unsent:
                if slot.state is not _READY:
                    self._offers(slot).followers[tier.index] = request

    def keep_headroom(self) -> None:
        """Keep slots free by sending owed chunks to their tiers and evicting other chunks."""
        if not self._on_evict:
            return
        shortage = max(self.headroom_slots, self.missing)
        # Count the slots of running stores as free, because they will be free soon.
        chunk_bytes = self._primary.chunk_bytes
        under_way = max(tier.client.store_bytes for tier in self._on_evict) // chunk_bytes
        shortage -= self._primary.free_slots + under_way
        self.missing = 0
        if shortage <= 0:
            return
        by_key = self._primary.by_key
        victims = [by_key[key] for key in self._primary.victims(shortage, owed=True)]
        for tier in self._on_evict:
            owed = [slot for slot in victims if self._offers(slot).owed & tier.bit]
            if not tier.client.takes_stores:
                # Drop the stores, because chunks owed to an unusable tier would fill the pool.
                tier.client.drop_stores([slot.key for slot in owed])
                for slot in owed:
                    self._offers(slot).owed &= ~tier.bit
            else:
                self._offer(tier, owed[: tier.client.store_room], NO_REQUEST)
        self._primary.evict(
            [slot.key for slot in victims if not self._offers(slot).owed and not slot.pins]
        )

    def settled(self, index: int, job: Job, verdicts: Sequence[Verdict]) -> None:
        """Apply the verdicts of a store. Its chunks are no longer owed to the tier."""
        if not self.tracks and verdicts.count(_OK) == len(verdicts):
            return
        tier = self._tiers[index]
        for key, place, verdict in zip(job.keys, job.slots, verdicts, strict=True):
            if verdict is not _OK:
                tier.admission.failed(key)
            slot = self._primary.slots[place]
            # Skip a slot that a reset has emptied during the store.
            if slot.state is not _READY:
                continue
            if verdict is not _OK:
                self._note_failed(slot, tier.bit)
            if slot.offers is not None:
                slot.offers.owed &= ~tier.bit

    def removed(self, index: int, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        tier = self._tiers[index]
        tier.admission.removed(keys, evicted=evicted)
        if self.tracks:
            for key in keys:
                slot = self._primary.by_key.get(key)
                if slot is not None and slot.offers is not None:
                    slot.offers.sent &= ~tier.bit

    def _offer(self, tier: ManagedTier, slots: Sequence[Slot], request: RequestContext) -> None:
        policy = tier.store_policy
        if policy.filters:
            wanted = []
            for slot in slots:
                offers = slot.offers
                hits = 0 if offers is None else offers.hits
                if policy.wants(slot.key, hits, request):
                    wanted.append(slot)
                elif offers is not None:
                    offers.owed &= ~tier.bit
            slots = wanted
        self._send(tier, slots, request)

    def _send(self, tier: ManagedTier, slots: Sequence[Slot], request: RequestContext) -> None:
        if not slots:
            return
        keys, indices = [slot.key for slot in slots], [slot.index for slot in slots]
        job = tier.client.store(keys, indices, request)
        taken = 0 if job is None else len(job.keys)
        for slot in slots[:taken]:
            slot.pins += 1
        tier.admission.sent(keys[:taken])
        if self.tracks:
            for slot in slots[:taken]:
                self._offers(slot).sent |= tier.bit
        for slot in slots[taken:]:
            self._note_failed(slot, tier.bit)

    def _unsent(self, tier: ManagedTier, slots: Sequence[Slot]) -> list[Slot]:
        return [slot for slot in slots if not self._offers(slot).sent & tier.bit]

    def _note_failed(self, slot: Slot, bit: int) -> None:
        if bit & self._stored_mask:
            self._offers(slot).failed |= bit
            self._has_failed = True
        if slot.offers is not None:
            slot.offers.sent &= ~bit

    def _take_failed(self, tier: ManagedTier, slots: Sequence[Slot]) -> list[Slot]:
        """Return the failed slots that fit the tier's queue, and clear their marks."""
        if not tier.client.takes_stores:
            return []
        failed = [
            slot for slot in slots if slot.offers is not None and slot.offers.failed & tier.bit
        ][: tier.client.store_room]
        for slot in failed:
            self._offers(slot).failed &= ~tier.bit
        return failed

    def _offers(self, slot: Slot) -> Offers:
        if slot.offers is None:
            slot.offers = Offers()
        return slot.offers

    def _serve_followers(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            offers = self._offers(slot)
            followers, offers.followers = offers.followers, {}
            for index, request in followers.items():
                tier = self._tiers[index]
                self._send(tier, self._unsent(tier, [slot]), request)
