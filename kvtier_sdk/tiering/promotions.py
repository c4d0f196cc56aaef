"""Chunks on their way from a tier into the primary one, and the requests that wait for them."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier_sdk.jobs import Job, Verdict
from kvtier_sdk.primary import PrimaryTier, Slot, SlotState
from kvtier_sdk.tiering.probes import Probe
from kvtier_sdk.tiering.requests import RequestState
from kvtier_sdk.tiering.tier_port import TierPort
from kvtier_sdk.types import OffloadKey


@dataclass(eq=False, slots=True)
class Promotion:
    """One chunk's load.

    Attributes:
        probe: the answer that it rests on.
        tier: index of the tier that brings it.
        waiters: requests that want it.
    """

    probe: Probe
    tier: int
    waiters: list[RequestState]


class Promotions:
    """Takes slots for loads, and holds what was loaded until its requests have used it.

    Slots that are loading, held, or in quarantine after a failed load count against a limit, so
    that loads for a deep waiting queue leave room for the stores of what runs.

    Args:
        primary: the slot table.
        limit: how many slots promotions may occupy at once.
    """

    def __init__(self, primary: PrimaryTier, limit: int) -> None:
        self._primary = primary
        self._limit = limit
        self._occupied = 0
        self._failed: dict[int, list[Slot]] = {}

    def start(self, probe: Probe, port: TierPort, state: RequestState) -> bool:
        """Take a slot for a chunk at once, and collect its load.

        Args:
            probe: says that the tier has it.
            port: the tier.
            state: the request that wants it.

        Returns:
            False where there is no room in the pool or in the queue; the reason is counted.
        """
        if not port.has_load_room:
            port.stats.dropped["load.queue_full"] += 1
            return False
        taken = self._primary.take(1) if self._occupied < self._limit else []
        if not taken:
            port.stats.dropped["load.primary_full"] += 1
            return False
        slot = taken[0]
        self._occupied += 1
        self._primary.assign(slot, probe.key, SlotState.LOADING)
        slot.promotion = Promotion(probe, port.index, [])
        self.join(slot, state)
        port.load(probe.key, slot.index, state.context)
        return True

    def join(self, slot: Slot, state: RequestState) -> None:
        """A request waits for a load that is under way; if it fails, the answer is its too."""
        slot.promotion.waiters.append(state)
        state.pending[slot.key] = slot
        state.probes[slot.key] = slot.promotion.probe

    def concluded(self, job: Job, verdicts: list[Verdict], parents: bool) -> list[OffloadKey]:
        """Take the verdicts of a load job.

        Args:
            job: the job.
            verdicts: one a key.
            parents: whether the policy wants each chunk's place in its prefix.

        Returns:
            The chunks that have become readable.
        """
        landed = []
        failed = []
        # The last first, as in complete_store: the start of a prefix shall be the last to go.
        for index in range(len(job.keys) - 1, -1, -1):
            slot = self._primary.slots[job.slots[index]]
            promotion: Promotion = slot.promotion
            for state in promotion.waiters:
                state.pending.pop(slot.key, None)
            if verdicts[index] is Verdict.OK:
                self._land(slot, promotion, job, parents)
                landed.append(slot.key)
            else:
                # The next tier that has it is tried; with none left, the answer is a miss.
                promotion.probe.hits &= ~(1 << promotion.tier)
                self._primary.forget(slot)
                failed.append(slot)
        if failed:
            self._failed[job.job_id] = failed
        return landed

    def released(self, job: Job) -> None:
        """The I/O of a load job has ended: the slots of its failed chunks are free."""
        for slot in self._failed.pop(job.job_id, ()):
            self._primary.give_back(slot)
            self._occupied -= 1

    def let_go(self, key: OffloadKey, state: RequestState) -> bool:
        """Drop the pin that a request holds on a chunk that was promoted for it.

        Returns:
            Whether there was one.
        """
        slot = state.holds.pop(key, None)
        if slot is None:
            return False
        slot.pins -= 1
        slot.holds -= 1
        if not slot.holds:
            self._occupied -= 1
        return True

    def abandon(self, state: RequestState) -> None:
        """A request is over: it holds nothing and waits for nothing any more."""
        for slot in state.pending.values():
            slot.promotion.waiters.remove(state)
        state.pending.clear()
        for key in list(state.holds):
            self.let_go(key, state)

    def _land(self, slot: Slot, promotion: Promotion, job: Job, parents: bool) -> None:
        slot.promotion = None
        slot.source = promotion.tier
        slot.holds = len(promotion.waiters)
        slot.pins += slot.holds
        for state in promotion.waiters:
            state.holds[slot.key] = slot
        if parents and promotion.waiters:
            slot.parent, slot.position = promotion.waiters[0].lineage.note(slot.key)
        if not slot.holds:
            self._occupied -= 1
        self._primary.publish(slot, job.request)
