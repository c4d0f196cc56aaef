"""Loads chunks from the secondary tiers into the primary tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.tiering.records import PendingLookup, Promotion, RequestState, Slot, SlotState
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey

_MOST_FAILED = 4096  # failed loads to remember, so that no load is repeated for an outdated answer

_OK: Final = Verdict.OK
_LOADING: Final = SlotState.LOADING


class Promotions:
    """The chunks that are being loaded into slots, or are loaded and not used yet.

    A request *claims* each chunk that is promoted for it. The claim pins the slot until the request
    uses the chunk. A slot has a ``Promotion`` while it is loading, claimed, or in quarantine after
    a failed load. The number of promotions is limited, to leave slots for stores.
    """

    def __init__(self, primary: PrimaryTier, limit: int) -> None:
        self._primary = primary
        self._limit = limit
        self._occupied = 0
        # For each chunk and tier, the step of the last failed load, in chronological order.
        self.failed: OrderedDict[tuple[OffloadKey, int], int] = OrderedDict()

    def start(
        self,
        keys: Sequence[OffloadKey],
        pending: PendingLookup,
        tier: ManagedTier,
        state: RequestState,
    ) -> int:
        """Queue loads of the leading chunks that get slots; return the number of these chunks."""
        # Leased chunks occupy slots too, and must not use up the reserve for stores.
        limit = self._limit - len(self._primary.leases.held)
        slots, _ = self._primary.take(max(0, min(len(keys), limit - self._occupied)))
        taken = keys[: len(slots)]
        if not taken:
            return 0
        self._primary.assign(taken, slots, _LOADING)
        self._occupied += len(slots)
        claims, asked, index = state.claims, state.asked, tier.index
        for key, slot in zip(taken, slots, strict=True):
            slot.promotion = Promotion(pending, index, state)
            slot.pins += 1
            claims[key] = slot
            asked[key] = pending
        tier.client.load(taken, [slot.index for slot in slots], state.context)
        return len(slots)

    def join(self, slot: Slot, state: RequestState) -> None:
        promotion = slot.promotion
        assert promotion is not None
        promotion.waiters.append(state)
        promotion.claims += 1
        slot.pins += 1
        state.claims[slot.key] = slot
        if promotion.pending.shared and not promotion.pending.is_known:
            # If the load fails, the request uses these answers to find the next tier to try.
            state.asked[slot.key] = promotion.pending

    def concluded(self, job: Job, verdicts: Sequence[Verdict]) -> list[Slot]:
        """Apply a load's verdicts; return the slots whose chunks have arrived."""
        slots = self._primary.slots
        landed = []
        for index, verdict in zip(job.slots, verdicts, strict=True):
            slot = slots[index]
            # Skip a slot if a reset has emptied it during the load.
            if slot.state is _LOADING:
                if verdict is _OK:
                    assert slot.promotion is not None
                    slot.promotion.waiters.clear()
                    landed.append(slot)
                else:
                    self._fail(slot)
        return landed

    def removed(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        """Record that a tier lost chunks, so that waiting requests look for them elsewhere."""
        for key in keys:
            slot = self._primary.by_key.get(key)
            if slot is not None and slot.state is _LOADING and slot.promotion is not None:
                slot.promotion.pending.strike(key, tier)

    def released(self, job: Job) -> None:
        slots = self._primary.slots
        for index in job.slots:
            slot = slots[index]
            promotion = slot.promotion
            if promotion is not None and not promotion.claims:
                self._vacate(slot)
            self._primary.unpin(slot)

    def let_go(self, key: OffloadKey, state: RequestState) -> int:
        """Release a request's claim on a chunk; return the index of the chunk's source tier."""
        slot = state.claims.pop(key)
        promotion = slot.promotion
        assert promotion is not None
        promotion.claims -= 1
        if slot.state is _LOADING:
            promotion.waiters.remove(state)
        elif not promotion.claims:
            self._vacate(slot)
        self._primary.unpin(slot)
        return promotion.tier

    def abandon(self, state: RequestState) -> None:
        for key in list(state.claims):
            self.let_go(key, state)

    def forget(self, slot: Slot) -> None:
        """Empty a slot, even a claimed one. The slot of a running load goes into quarantine."""
        promotion = slot.promotion
        if promotion is not None:
            claims, promotion.claims = promotion.claims, 0
            if slot.state is not _LOADING:
                self._vacate(slot)
            self._primary.unpin(slot, claims)
        self._primary.forget(slot)

    def forget_all(self) -> list[OffloadKey]:
        """Empty all slots; return the keys of the chunks that were readable."""
        known = list(self._primary.by_key.values())
        readable = [slot.key for slot in known if slot.state is SlotState.READY]
        for slot in known:
            self.forget(slot)
        return readable

    def _fail(self, slot: Slot) -> None:
        # A waiting request keeps the tiers' answers, so it next tries another tier that has the
        # chunk. If no lookup preceded this load, no answers exist, so the request asks all tiers.
        promotion = slot.promotion
        assert promotion is not None
        pending = promotion.pending
        pending.strike(slot.key, promotion.tier)
        self._note_failure(slot.key, promotion.tier)
        for state in promotion.waiters:
            del state.claims[slot.key]
        self.forget(slot)

    def _note_failure(self, key: OffloadKey, tier: int) -> None:
        self.failed[key, tier] = self._primary.step
        self.failed.move_to_end((key, tier))
        if len(self.failed) > _MOST_FAILED:
            self.failed.popitem(last=False)

    def _vacate(self, slot: Slot) -> None:
        slot.promotion = None
        self._occupied -= 1
