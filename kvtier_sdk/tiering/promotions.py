"""Chunks on their way from a tier into the primary tier, and the requests that wait for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.tiering.records import PendingLookup, Promotion, RequestState, Slot, SlotState
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey

#: The most failed loads to remember, for requests whose lookups ended before the failure.
_MOST_FAILED = 4096

_OK: Final = Verdict.OK
_LOADING: Final = SlotState.LOADING


class Promotions:
    """Takes slots for loads, and keeps loaded chunks until their requests have used them.

    A request *claims* a chunk that is promoted for it: it holds a pin on the slot from then on.
    A slot that is loading, claimed, or in quarantine after a failed load has a ``Promotion``. Their
    number is limited, so that a deep waiting queue leaves room to stores of running requests.
    """

    def __init__(self, primary: PrimaryTier, limit: int) -> None:
        self._primary = primary
        self._limit = limit
        self._occupied = 0
        # The step in which a load of a chunk from a tier last failed; the newest comes last.
        self._failed: OrderedDict[tuple[OffloadKey, int], int] = OrderedDict()

    def start(
        self,
        keys: Sequence[OffloadKey],
        pending: PendingLookup,
        tier: ManagedTier,
        state: RequestState,
    ) -> int:
        """Assign slots to chunks at once, and collect their loads; return their number."""
        slots, _ = self._primary.take(min(len(keys), self._limit - self._occupied))
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
            if state.prefix_order is not None:
                slot.parent, slot.position = state.prefix_order.note(key)
        tier.client.load(taken, [slot.index for slot in slots], state.context)
        return len(slots)

    def join(self, slot: Slot, state: RequestState) -> None:
        """Have a request wait for a load that is under way."""
        promotion = slot.promotion
        assert promotion is not None
        promotion.waiters.append(state)
        promotion.claims += 1
        slot.pins += 1
        state.claims[slot.key] = slot
        if promotion.pending.shared:
            # If the load fails, the request tries the other tiers that answered this lookup.
            state.asked[slot.key] = promotion.pending

    def concluded(self, job: Job, verdicts: Sequence[Verdict]) -> list[Slot]:
        """Apply the verdicts of a load; return the slots whose chunks have arrived."""
        slots = self._primary.slots
        landed = []
        for index, verdict in zip(job.slots, verdicts, strict=True):
            slot = slots[index]
            # A reset has forgotten a slot that is not loading any more.
            if slot.state is _LOADING:
                if verdict is _OK:
                    assert slot.promotion is not None
                    slot.promotion.waiters.clear()
                    landed.append(slot)
                else:
                    self._fail(slot)
        return landed

    def removed(self, tier: int, keys: Sequence[OffloadKey]) -> None:
        """Record chunks that left a tier, so that failed loads do not fall through to it."""
        for key in keys:
            slot = self._primary.by_key.get(key)
            if slot is not None and slot.state is _LOADING and slot.promotion is not None:
                slot.promotion.pending.strike(key, tier)

    def released(self, job: Job) -> None:
        """Release the pins of a load whose I/O has ended; slots without a chunk become free."""
        slots = self._primary.slots
        for index in job.slots:
            slot = slots[index]
            promotion = slot.promotion
            if promotion is not None and not promotion.claims:
                self._vacate(slot)
            self._primary.unpin(slot)

    def has_failed_since(self, key: OffloadKey, tier: int, step: int) -> bool:
        """Return true if a load of a chunk from a tier has failed after ``step``."""
        return self._failed.get((key, tier), -1) > step

    def let_go(self, key: OffloadKey, state: RequestState) -> int:
        """Release a request's pin on a chunk promoted for it; return the index of its tier."""
        slot = state.claims.pop(key)
        promotion = slot.promotion
        assert promotion is not None
        promotion.claims -= 1
        if slot.state is _LOADING:
            promotion.waiters.remove(state)
        elif not promotion.claims:
            self._vacate(slot)
        if promotion.pending.is_known:
            # No tier has answered, and the chunk may leave its tier.
            state.asked.pop(key, None)
        self._primary.unpin(slot)
        return promotion.tier

    def abandon(self, state: RequestState) -> None:
        for key in list(state.claims):
            self.let_go(key, state)

    def forget(self, slot: Slot) -> None:
        """Empty a slot, even if it is claimed; a running load continues in quarantine."""
        promotion = slot.promotion
        if promotion is not None:
            claims, promotion.claims = promotion.claims, 0
            if slot.state is not _LOADING:
                self._vacate(slot)
            self._primary.unpin(slot, claims)
        self._primary.forget(slot)

    def forget_all(self) -> list[OffloadKey]:
        """Remove every chunk from its slot; return the readable ones."""
        known = list(self._primary.by_key.values())
        readable = [slot.key for slot in known if slot.state is SlotState.READY]
        for slot in known:
            self.forget(slot)
        return readable

    def _fail(self, slot: Slot) -> None:
        # The next tier that has the chunk is tried; with none left, the answer is a miss. After a
        # load without a lookup the tiers are asked first: the chunk may have left the others too.
        promotion = slot.promotion
        assert promotion is not None
        pending = promotion.pending
        pending.strike(slot.key, promotion.tier)
        self._note_failure(slot.key, promotion.tier)
        for state in promotion.waiters:
            del state.claims[slot.key]
            if pending.is_known:
                state.asked.pop(slot.key, None)
        self.forget(slot)

    def _note_failure(self, key: OffloadKey, tier: int) -> None:
        self._failed[key, tier] = self._primary.step
        self._failed.move_to_end((key, tier))
        if len(self._failed) > _MOST_FAILED:
            self._failed.popitem(last=False)

    def _vacate(self, slot: Slot) -> None:
        slot.promotion = None
        self._occupied -= 1
