"""Searches the tiers for chunks that are not in the primary tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Final

from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.tiering.outputs import MissReason
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.records import PendingLookup, RequestState, Wait, check_keys
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.types import LookupResult, OffloadKey

_MISS: Final = LookupResult.MISS
_HIT_PENDING: Final = LookupResult.HIT_PENDING
_RETRY: Final = LookupResult.RETRY
_ABSENT: Final = MissReason.ABSENT.value
_OK: Final = Verdict.OK
_NOT_FOUND: Final = Verdict.NOT_FOUND

#: The most chunks to look up at once; looking up this many takes about 15 ms of a step. Requests
#: far back in the engine's queue must wait for device blocks anyway, so their lookups can wait too.
MOST_CHUNKS: Final = 16_384
#: The reason for a miss, by the lookup's verdict; LOOKUP_FAILED for other verdicts.
_DOUBTS = {
    Verdict.TIMEOUT: MissReason.TIMEOUT.value,
    Verdict.UNAVAILABLE: MissReason.UNAVAILABLE.value,
}


class LookupTable:
    """The pending lookups, and the limit on chunks that are looked up at once."""

    def __init__(self) -> None:
        self.open: dict[OffloadKey, PendingLookup] = {}  # the lookups that requests can share
        self.waiting_chunks = 0  # chunks for which some tier has not answered
        self.limit = MOST_CHUNKS  # at this count, no further request begins lookups in the step
        self._joined = 0  # chunks looked up in this step without asking a tier; these count too
        self.new: list[PendingLookup] = []  # begun in this step, and sent to the tiers at its end

    @property
    def is_full(self) -> bool:
        return self.waiting_chunks + self._joined >= self.limit

    def add(self, pending: PendingLookup, key: OffloadKey) -> None:
        pending.keys.append(key)
        if not pending.waiting:
            self._joined += 1
            return
        self.waiting_chunks += 1
        if pending.shared:
            self.open[key] = pending

    def join(self, key: OffloadKey) -> PendingLookup | None:
        pending = self.open.get(key)
        if pending is not None:
            self._joined += 1
        return pending

    def step_ended(self) -> None:
        self._joined = 0

    def take_new(self) -> list[PendingLookup]:
        taken, self.new = self.new, []
        for pending in taken:
            pending.sealed = True
        return taken

    def answered(self, pending: PendingLookup, bit: int, verdicts: Sequence[Verdict]) -> None:
        if not pending.waiting & bit:
            return
        hits = pending.hits
        for key, verdict in zip(pending.keys, verdicts, strict=True):
            if verdict is _OK:
                hits[key] = hits.get(key, 0) | bit
            elif verdict is not _NOT_FOUND:
                pending.doubt = _DOUBTS.get(verdict, MissReason.LOOKUP_FAILED.value)
        pending.waiting &= ~bit
        if not pending.waiting:
            self._close(pending)

    def give_up(self, pending: PendingLookup) -> None:
        pending.waiting = 0
        pending.doubt = MissReason.TIMEOUT.value
        self._close(pending)

    def forget(self) -> None:
        """Drop all lookups, because after a reset no request needs the answers."""
        self.open.clear()
        for pending in self.new:
            if pending.waiting:
                self.waiting_chunks -= len(pending.keys)
        self.new.clear()

    def _close(self, pending: PendingLookup) -> None:
        self.waiting_chunks -= len(pending.keys)
        for key in pending.keys:
            # An unshared lookup is not in the table, but another lookup of the chunk may be.
            if self.open.get(key) is pending:
                del self.open[key]


@dataclass(eq=False)
class TierSearch:
    tiers: Sequence[ManagedTier]
    primary: PrimaryTier
    promotions: Promotions
    requests: dict[str, RequestState]
    lookups: LookupTable = field(default_factory=LookupTable)

    def find(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Look up a chunk that is not in the primary tier; see :meth:`TieringManager.lookup`."""
        pending = state.asked.get(key)
        if pending is None:
            step = self.primary.step
            if state.turn != step:
                if self.lookups.is_full:
                    state.wait_in(step).put_off = key
                    return _RETRY
                state.turn = step
            pending = self._ask(key, state)
            if pending is None:
                return _MISS
        having = pending.hits.get(key)
        # Another request's lookup may have hits in tiers that this request may not ask.
        if having and having & state.tiers:
            if not pending.sealed:
                return _RETRY
            reason = self._begin_load(key, pending, state)
            if reason is None:
                return _HIT_PENDING
            self._count_miss(key, state, reason.value)
            return _MISS
        if pending.waiting:
            if self.primary.now_s <= pending.deadline_s:
                wait = state.wait_in(self.primary.step)
                if pending is not wait.latest:
                    wait.note_lookup(pending)
                return _RETRY
            self.lookups.give_up(pending)
        no_hit = pending.doubt or _ABSENT
        self._count_miss(key, state, no_hit if having is None else MissReason.LOAD_FAILED.value)
        return _MISS

    def wait_of(self, state: RequestState) -> Wait | None:
        wait = state.wait
        if wait is None:
            return None
        key = wait.put_off
        has_turn = key is not None and (key in self.primary.by_key or not self.lookups.is_full)
        if has_turn or wait.is_over(self.primary.now_s):
            state.wait = None
        return state.wait

    def hand_over(self) -> None:
        """Send the new lookups to the tiers, and begin the loads that need no lookup."""
        for pending in self.lookups.take_new():
            if not pending.waiting:
                self._load_known(pending)
                continue
            recompute_s = self.primary.stats.recompute_s
            # Without an estimate, allow the longest wait. Recomputing usually takes even longer.
            worth_s = inf if recompute_s is None else len(pending.keys) * recompute_s
            pending.deadline_s = 0.0
            for tier in self.tiers:
                if pending.waiting & tier.bit:
                    job = tier.client.lookup(
                        pending.keys, pending.request, tag=pending, worth_s=worth_s
                    )
                    pending.deadline_s = max(pending.deadline_s, job.deadline_s)
            if pending.skipped:
                self._drop_lookups(pending.skipped, len(pending.keys))

    def _ask(self, key: OffloadKey, state: RequestState) -> PendingLookup | None:
        """Ask the tiers for a chunk, or join a pending lookup; return ``None`` for a miss."""
        if type(key) is not bytes:
            check_keys((key,))
        if not self.tiers:
            self._count_miss(key, state, _ABSENT)
            return None
        # A request that may ask only some tiers cannot share a lookup that asks all tiers.
        pending = self.lookups.join(key) if state.tiers == -1 else None
        if pending is None:
            known = 0
            pending = state.asking
            if pending is None or pending.sealed:
                # Load without a lookup only if no earlier chunk is being looked up. Otherwise the
                # prefix may end at the earlier chunk, and the load would be wasted.
                if not state.asks_first:
                    known = self._known_tiers(key, state)
                pending = self._known_lookup(state) if known else self._begin_lookup(key, state)
                if pending is None:
                    return None
            self.lookups.add(pending, key)
            if known:
                pending.hits[key] = known
        state.asked[key] = pending
        return pending

    def _begin_lookup(self, key: OffloadKey, state: RequestState) -> PendingLookup | None:
        """Begin a lookup. If no tier takes reads, count a miss and return ``None``."""
        may_ask = tiers = 0
        for tier in self.tiers:
            if tier.bit & state.tiers and not tier.client.is_drained:
                may_ask |= tier.bit
                if tier.client.takes_reads:
                    tiers |= tier.bit
        if not tiers:
            reason = MissReason.UNAVAILABLE if may_ask else MissReason.ABSENT
            if self._count_miss(key, state, reason.value):
                self._drop_lookups(may_ask, 1)
            return None
        pending = state.asking = self._begin(state, tiers)
        if tiers != may_ask:
            pending.doubt = MissReason.UNAVAILABLE.value
            pending.skipped = may_ask & ~tiers
        return pending

    def _begin(self, state: RequestState, tiers: int) -> PendingLookup:
        pending = PendingLookup(state.context, tiers, self.primary.step, state.tiers == -1)
        self.lookups.new.append(pending)
        return pending

    def _known_tiers(self, key: OffloadKey, state: RequestState) -> int:
        """Return the tiers known to have a chunk; 0 if the first usable tier may lack it."""
        known = 0
        for tier in self.tiers:
            if tier.bit & state.tiers and tier.client.takes_reads:
                if tier.client.knows(key):
                    known |= tier.bit
                elif not known:
                    break
        return known

    def _known_lookup(self, state: RequestState) -> PendingLookup:
        pending = state.known
        if pending is None or pending.sealed:
            pending = state.known = self._begin(state, 0)
            pending.is_known = True
        return pending

    def _load_known(self, pending: PendingLookup) -> None:
        state = self.requests.get(pending.request.request_id)
        if state is None or state.finished:
            return
        for key in pending.keys:
            if state.asked.get(key) is not pending:
                continue
            if key not in self.primary.by_key and not state.asks_first:
                # A load that cannot begin is not a miss yet. The next step looks up the chunk.
                state.asks_first = self._begin_load(key, pending, state) is not None
            # The chunk may leave its tier at any time, so a later load must check again.
            del state.asked[key]

    def _begin_load(
        self, key: OffloadKey, pending: PendingLookup, state: RequestState
    ) -> MissReason | None:
        """Load a chunk and its successors; return the reason if the load cannot begin."""
        tier = self.tiers[pending.first_hit(key, state.tiers)]
        failed = self.promotions.failed
        while not tier.client.takes_reads or (
            failed and failed.get((key, tier.index), -1) > pending.step
        ):
            # The answer is outdated: the tier now refuses reads, or failed to load the chunk.
            pending.strike(key, tier.index)
            if not pending.hits[key] & state.tiers:
                return MissReason.UNAVAILABLE
            tier = self.tiers[pending.first_hit(key, state.tiers)]
        room = tier.client.load_room
        if not room:
            tier.client.stats.dropped["load.queue_full"] += 1
            return MissReason.QUEUE_FULL
        if not state.is_prefetch and not self._is_worth_loading(pending, tier.client):
            return MissReason.SLOWER_THAN_RECOMPUTE
        keys = [key]
        if pending.request is state.context:
            # Load the following chunks in the same job, because the request needs them too.
            keys = pending.run_from(key, tier.index, room)
            by_key = self.primary.by_key
            if len(keys) > 1:
                keys = [k for k in keys if k not in by_key]
        if self.promotions.start(keys, pending, tier, state):
            return None
        tier.client.stats.dropped["load.primary_full"] += 1
        return MissReason.PRIMARY_FULL

    def _is_worth_loading(self, pending: PendingLookup, tier: TierClient) -> bool:
        recompute_s = self.primary.stats.recompute_s
        if recompute_s is None:
            return True
        if pending.worth_loading is None:
            found = len(pending.hits)
            pending.worth_loading = tier.expected_load_s(found) <= found * recompute_s
        return pending.worth_loading

    def _count_miss(self, key: OffloadKey, state: RequestState, reason: str) -> bool:
        """Count a request's miss of a chunk; return false if the miss was already counted."""
        if state.is_prefetch or key in state.missed:
            return False
        state.missed.add(key)
        self.primary.stats.misses[reason] += 1
        return True

    def _drop_lookups(self, tiers: int, chunks: int) -> None:
        for tier in self.tiers:
            if tiers & tier.bit:
                tier.client.drop_lookups(chunks)
