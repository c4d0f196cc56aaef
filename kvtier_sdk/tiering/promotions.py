"""Chunks on their way from a tier into the primary one, and the requests that wait for them."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.runner.jobs import Job, Verdict
from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.requests import RequestState
from kvtier_sdk.tiering.slots import PrimaryTier, Slot, SlotState
from kvtier_sdk.tiering.tier_port import TierPort
from kvtier_sdk.types import OffloadKey

_OK = Verdict.OK
_LOADING, _QUARANTINED = SlotState.LOADING, SlotState.QUARANTINED


class Promotion:
    """One chunk's way up.

    Attributes:
        question: the answers that the load rests on.
        tier: index of the tier that brings it.
        waiters: while it is loading, the requests that want it.
        claims: how many requests have a pin on it and have not used it yet.
    """

    __slots__ = ("claims", "question", "tier", "waiters")

    def __init__(self, question: PendingLookup, tier: int, state: RequestState) -> None:
        self.question = question
        self.tier = tier
        self.waiters = [state]
        self.claims = 1


class Promotions:
    """Takes slots for loads, and keeps what was loaded until its requests have used it.

    A request *claims* a chunk that is promoted for it: it holds a pin on the slot from then on.
    Slots that are loading, claimed, or in quarantine after a failed load have a
    :class:`Promotion`, and their number is limited, so that loads for a deep waiting queue leave
    room for the stores of what runs.

    Args:
        primary: the slot table.
        limit: how many slots promotions may occupy at once.
    """

    def __init__(self, primary: PrimaryTier, limit: int) -> None:
        self._primary = primary
        self._limit = limit
        self._occupied = 0

    def start(
        self,
        keys: Sequence[OffloadKey],
        question: PendingLookup,
        port: TierPort,
        state: RequestState,
    ) -> int:
        """Take slots for chunks at once, and collect their loads.

        Args:
            keys: chunks that are not in the primary tier, in prefix order.
            question: says that the tier has them.
            port: the tier.
            state: the request that wants them.

        Returns:
            How many, from the front, got a slot; the pool has no room for the others.
        """
        slots = self._primary.take(min(len(keys), self._limit - self._occupied))
        taken = keys[: len(slots)]
        self._primary.assign(taken, slots, _LOADING)
        self._occupied += len(slots)
        claims, asked, tier = state.claims, state.asked, port.index
        for key, slot in zip(taken, slots, strict=True):
            slot.promotion = Promotion(question, tier, state)
            slot.pins += 1
            claims[key] = slot
            asked[key] = question
            if state.prefix_order is not None:
                slot.parent, slot.position = state.prefix_order.note(key)
        port.load(taken, [slot.index for slot in slots], state.context)
        return len(slots)

    def join(self, slot: Slot, state: RequestState) -> None:
        """A request waits for a load that is under way.

        If that fails, it falls through to the other tiers that have the chunk: by the answers the
        load rests on, or by its own where those were not everybody's.
        """
        promotion: Promotion = slot.promotion
        promotion.waiters.append(state)
        promotion.claims += 1
        slot.pins += 1
        state.claims[slot.key] = slot
        if promotion.question.shared:
            state.asked[slot.key] = promotion.question

    def concluded(self, job: Job, verdicts: Sequence[Verdict]) -> list[Slot]:
        """Take the verdicts of a load job: what has failed is forgotten.

        Args:
            job: the job.
            verdicts: one a key.

        Returns:
            The slots of the chunks that are readable now, in prefix order, not yet published.
            Their pins by the job stay until it is released.
        """
        slots = self._primary.slots
        landed = []
        for index, verdict in zip(job.slots, verdicts, strict=True):
            slot = slots[index]
            # A slot that is no longer loading was forgotten by a reset meanwhile.
            if slot.state is _LOADING:
                if verdict is _OK:
                    slot.promotion.waiters.clear()
                    landed.append(slot)
                else:
                    self._fail(slot)
        return landed

    def released(self, job: Job) -> None:
        """The I/O of a load job has ended: slots whose chunk did not arrive are free."""
        slots, unpin = self._primary.slots, self._primary.unpin
        for index in job.slots:
            slot = slots[index]
            promotion = slot.promotion
            if promotion is not None and not promotion.claims:
                self._vacate(slot)
            unpin(slot)

    def let_go(self, key: OffloadKey, state: RequestState) -> int:
        """Drop the pin that a request holds on a chunk that was promoted for it.

        Args:
            key: a chunk that the request claims.
            state: the request.

        Returns:
            Index of the tier that the chunk came from.
        """
        slot = state.claims.pop(key)
        promotion: Promotion = slot.promotion
        promotion.claims -= 1
        if slot.state is _LOADING:
            promotion.waiters.remove(state)
        elif not promotion.claims:
            self._vacate(slot)
        self._primary.unpin(slot)
        return promotion.tier

    def abandon(self, state: RequestState) -> None:
        """A request is over: it holds nothing and waits for nothing any more."""
        for key in list(state.claims):
            self.let_go(key, state)

    def forget(self, slot: Slot) -> None:
        """Take the chunk out of its slot, whoever claims it; loading goes on in quarantine."""
        promotion: Promotion | None = slot.promotion
        if promotion is not None:
            claims, promotion.claims = promotion.claims, 0
            if slot.state is not _LOADING:
                self._vacate(slot)
            self._primary.unpin(slot, claims)
        self._primary.forget(slot)

    def withdraw(self, index: int) -> None:
        """The load of a slot that was forgotten will not even begin."""
        slot = self._primary.slots[index]
        self._vacate(slot)
        self._primary.unpin(slot)

    def _fail(self, slot: Slot) -> None:
        # The next tier that has it is tried; with none left, the answer is a miss.
        promotion: Promotion = slot.promotion
        promotion.question.strike(slot.key, promotion.tier)
        for state in promotion.waiters:
            del state.claims[slot.key]
        self.forget(slot)

    def _vacate(self, slot: Slot) -> None:
        slot.promotion = None
        self._occupied -= 1
