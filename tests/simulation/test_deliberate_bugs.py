"""The simulation finds every bug that this module plants.

Each bug is a small change to one or two methods. ``-s`` shows the seed that found each bug.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.core import pure_core_only
from support.simulation import Breach, simulate

from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.events import PRIMARY, EventLog
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.policies.lru import LRUPolicy
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.compression import ChunkCompressor
from kvtier_sdk.runner.health import DirectionHealth
from kvtier_sdk.runner.jobs import BreakerMoved, JobResult, Operation, Report, Verdict
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.tiering import tier_client
from kvtier_sdk.tiering.cascade import Cascade, ManagedTier
from kvtier_sdk.tiering.hint_executor import HintExecutor
from kvtier_sdk.tiering.leases import Lease, Leases
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.prefetcher import Prefetcher
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.records import PendingLookup, RequestState, Slot, SlotState, Wait
from kvtier_sdk.tiering.search import LookupTable
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_record import JobTable
from kvtier_sdk.types import RequestContext

pytestmark = pure_core_only

#: Each bug must be found within this many seeds.
SEEDS = 200

Bug = Callable[[pytest.MonkeyPatch], None]
BUGS: dict[str, tuple[tuple[str, ...], int, Bug]] = {}


def bug(*rules: str, seed: int = 0) -> Callable[[Bug], Bug]:
    """Return a decorator that registers a bug, the rules that catch it, and its first seed."""

    def enter(make: Bug) -> Bug:
        BUGS[make.__name__] = rules, seed, make
        return make

    return enter


def around(owner: type, name: str) -> Callable[[Callable[..., Any]], Bug]:
    """Replace a method with the decorated function, ``change(original, self, ...)``."""

    def make(change: Callable[..., Any]) -> Bug:
        @functools.wraps(change)
        def enter(patch: pytest.MonkeyPatch) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda self, *a, **k: change(original, self, *a, **k))

        return enter

    return make


@bug("each pin has its owner", "a prefetch loads few chunks at once")
def an_abort_keeps_its_claims(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Promotions, "abandon", lambda self, state: None)


@bug("each pin has its owner")
def copies_are_forgotten_with_their_request(patch: pytest.MonkeyPatch) -> None:
    def end(self: Any, state: RequestState) -> None:
        if state.finished:
            self._requests.pop(state.context.request_id, None)

    patch.setattr(TieringManager, "_end_if_over", end)


@bug("each pin has its owner")
@around(PrimaryTier, "forget")
def a_slot_is_free_while_its_io_runs(original: Any, self: Any, slot: Slot) -> None:
    slot.pins = 0
    original(self, slot)


@bug("the manager knows its jobs", "each pin has its owner")
@around(TierClient, "_conclude")
def a_slot_is_used_again_once_the_deadline_has_passed(
    original: Any, self: Any, result: JobResult, now_s: float
) -> None:
    result.released = True
    original(self, result, now_s)


@bug("each pin has its owner")
@around(Cascade, "_send")
def a_store_does_not_pin(
    original: Any, self: Any, tier: ManagedTier, slots: Sequence[Slot], request: Any
) -> None:
    pins = [slot.pins for slot in slots]
    original(self, tier, slots, request)
    for slot, before in zip(slots, pins, strict=True):
        slot.pins = before


@bug("each pin has its owner")
@around(TieringManager, "reset_cache")
def a_reset_forgets_the_quarantine(original: Any, self: Any, scope: Any) -> None:
    original(self, scope)
    self.on_reset_flushed()


@bug("an answer belongs to its lookup", seed=155)
@around(LookupTable, "answered")
def a_late_answer_goes_to_a_later_lookup(
    original: Any, self: Any, pending: PendingLookup, bit: int, verdicts: Any
) -> None:
    if not pending.waiting:
        pending = next((self.open[key] for key in pending.keys if key in self.open), pending)
        # Repeat the verdicts, because the later lookup can have more keys.
        verdicts = (verdicts * len(pending.keys))[: len(pending.keys)]
    original(self, pending, bit, verdicts)


@bug(
    "a load rests on an answer", "a load that failed is not tried again on the same answer", seed=15
)
@around(LookupTable, "answered")
def verdicts_are_matched_off_by_one(
    original: Any, self: Any, pending: PendingLookup, bit: int, verdicts: Any
) -> None:
    original(self, pending, bit, [*verdicts[1:], verdicts[0]])


@bug("a load rests on an answer", seed=364)
def answers_of_before_a_reset_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LookupTable, "forget", lambda self: None)
    patch.setattr(RequestState, "forget_answers", lambda self: None)


@bug("a load rests on an answer", seed=311)
@around(JobTable, "without_removed")
def what_left_during_its_load_is_known(
    original: Any, self: JobTable, job: Any, keys: list[bytes]
) -> list[bytes]:
    kept: list[bytes] = original(self, job, keys)
    return keys if job.operation is Operation.LOAD else kept


@bug("promotions leave room to stores", seed=54)
@around(Promotions, "__init__")
def promotions_take_the_headroom(
    original: Any, self: Any, primary: PrimaryTier, limit: int
) -> None:
    original(self, primary, len(primary.slots))


@bug("what is owed to a tier stays until it had it")
def a_victim_leaves_before_it_was_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrimaryTier, "_is_evictable", PrimaryTier._is_idle)


@bug("the manager never raises", seed=18)
@around(TieringManager, "lookup")
def a_hit_can_be_evicted_in_its_own_step(original: Any, self: Any, key: bytes, request: Any) -> Any:
    answer = original(self, key, request)
    for slot in self._primary.slots:
        slot.hit_step = -1
    return answer


@bug("a job ends in one result")
@around(TierLoop, "_expire")
def a_job_is_reported_twice(original: Any, self: Any, run: Any) -> None:
    original(self, run)
    run.concluded = False


@bug("a job ends by its deadline")
def a_deadline_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierLoop, "_expire", lambda self, run: None)


@bug(
    "a readable slot holds its chunk", "only what was stored under a key reaches the device", seed=6
)
@around(Promotions, "concluded")
def a_failed_load_is_a_hit(original: Any, self: Any, job: Any, verdicts: Any) -> Any:
    return original(self, job, [Verdict.OK] * len(verdicts))


@bug("what is reported as loaded is there", seed=21)
def a_damaged_chunk_is_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkHeader, "check", lambda *arguments: None)


@bug("what is reported as loaded is there")
def a_compressed_chunk_is_not_expanded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkCompressor, "_expand", lambda self, transfer: None)


@bug("what is stored under a key is its chunk")
def memory_of_a_compressed_chunk_is_lent_twice(patch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def compressing(self: Any, batch: Any, moved: Any) -> AsyncIterator[Any]:
        async with original(self, batch, moved) as sent:
            pass
        yield sent

    original = ChunkCompressor.compressing
    patch.setattr(ChunkCompressor, "compressing", compressing)


@bug("what is stored under a key is its chunk", "each pin has its owner")
@around(TierClient, "store")
def slots_are_handed_over_in_another_order(
    original: Any, self: Any, keys: Any, slots: list[int], request: Any
) -> Any:
    return original(self, keys, slots[::-1], request)


@bug("an answer is true", "a slot has one owner", seed=4)
@around(TieringManager, "lookup")
def a_second_request_begins_a_second_load(
    original: Any, self: Any, key: bytes, request: Any
) -> Any:
    table = self._primary.by_key
    slot = table.get(key)
    if slot is None or slot.state is not SlotState.LOADING or key in self._state(request).claims:
        return original(self, key, request)
    del table[key]
    answer = original(self, key, request)
    table.setdefault(key, slot)
    return answer


@bug(
    "a load that failed is not tried again on the same answer", "a load rests on an answer", seed=32
)
def a_failed_load_is_tried_for_ever(patch: pytest.MonkeyPatch) -> None:
    def fail(original: Any, self: Any, slot: Slot) -> None:
        assert slot.promotion is not None
        hits, key = slot.promotion.pending.hits, slot.key
        before = hits[key]
        original(self, slot)
        hits[key] = before

    around(Promotions, "_fail")(fail)(patch)
    patch.setattr(Promotions, "_note_failure", lambda self, key, tier: None)


@bug("what is dropped is counted")
@around(TierClient, "_admit")
def a_drop_is_not_counted(
    original: Any, self: Any, operation: Any, count: int, *, whole: bool
) -> int:
    dropped = self.stats.dropped.copy()
    taken: int = original(self, operation, count, whole=whole)
    self.stats.dropped = dropped
    return taken


@bug("stores do not wait for another step")
@around(TieringManager, "on_request_finished")
def the_last_request_flushes_nothing(original: Any, self: Any, *arguments: Any) -> None:
    self._flush = lambda: None
    original(self, *arguments)
    del self._flush


@bug("at rest nothing is left", "nothing waits for ever")
@around(LookupTable, "_close")
def answers_make_no_room_for_those_put_off(
    original: Any, self: LookupTable, pending: PendingLookup
) -> None:
    self.waiting_chunks += len(pending.keys)
    original(self, pending)


@bug("pending work is told")
def pending_work_is_kept_secret(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TieringManager, "has_pending_work", lambda self: False)


@bug("a reset of the tiers too is cold", seed=9)
def a_reset_leaves_the_tiers_as_they_are(patch: pytest.MonkeyPatch) -> None:
    async def delete_all(self: Any) -> None:
        return

    patch.setattr(TierCaller, "delete_all", delete_all)


@bug("a reset of the tiers too is cold", "a load rests on an answer", seed=134)
def a_purge_does_not_wait_for_stores(patch: pytest.MonkeyPatch) -> None:
    async def purge(self: Any, run: Any, batch: range) -> None:
        await self._settle_all(run, batch, self.call.delete_all())

    patch.setattr(TierLoop, "_purge", purge)


@bug("a breaker closes without traffic")
def an_open_breaker_is_not_probed(patch: pytest.MonkeyPatch) -> None:
    async def probe(self: Any) -> None:
        return

    patch.setattr(DirectionHealth, "_probe", probe)


@bug("a request asks its own tiers alone", seed=225)
@around(Promotions, "join")
def who_joins_a_load_may_ask_all_tiers(
    original: Any, self: Any, slot: Slot, state: RequestState
) -> None:
    state.tiers = -1
    original(self, slot, state)


@bug("what a tier is not offered it has", seed=5)
@around(Cascade, "settled")
def a_failed_store_counts_as_sent(
    original: Any, self: Any, bit: int, job: Any, verdicts: Any
) -> None:
    original(self, bit, job, [Verdict.OK] * len(verdicts))


@bug("events agree with the tiers")
def what_has_left_once_is_never_announced_again(patch: pytest.MonkeyPatch) -> None:
    ever: set[bytes] = set()

    def without(self: JobTable, store: Any, keys: list[bytes]) -> list[bytes]:
        ever.update(self._gone.pop(store.job_id))
        return [key for key in keys if key not in ever]

    patch.setattr(JobTable, "without_removed", without)


@bug("at rest nothing is left")
@around(JobTable, "without_removed")
def what_has_left_is_remembered_for_ever(
    original: Any, self: JobTable, store: Any, keys: list[bytes]
) -> Any:
    newest = self._gone.copy()
    kept = original(self, store, keys)
    self._gone = newest
    return kept


@bug("events agree with the primary tier")
@around(EventLog, "add")
def an_eviction_is_not_announced(
    original: Any, self: Any, keys: Any, *, removed: bool, **more: Any
) -> None:
    if not removed or self._of[0] != PRIMARY:
        original(self, keys, removed=removed, **more)


# --- the tier client ------------------------------------------------------------------------


@bug("each pin has its owner", "the manager knows its jobs")
def a_release_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TierClient, "_release", lambda self, job_id: self.jobs.release(job_id))


@bug(
    "the manager knows its jobs",
    "each pin has its owner",
    "the manager never raises",
    "a load rests on an answer",
)
@around(TierClient, "_conclude")
def a_late_report_of_an_old_job_is_applied(
    original: Any, self: Any, result: JobResult, now_s: float
) -> None:
    running = self.jobs.running
    if result.job_id not in self.jobs._running and running:
        result.job_id = running[0].job_id
        result.verdicts = (result.verdicts * len(running[0].keys))[: len(running[0].keys)]
    original(self, result, now_s)


@bug("a breaker's state is mirrored")
def a_breaker_is_not_mirrored(patch: pytest.MonkeyPatch) -> None:
    note = tier_client.note_state

    def note_others(stats: TierStats, report: Report, now_s: float) -> None:
        if not isinstance(report, BreakerMoved):
            note(stats, report, now_s)

    patch.setattr(tier_client, "note_state", note_others)


@bug("queues are counted")
@around(TierClient, "_return_bytes")
def queue_bytes_are_not_given_back(original: Any, self: Any, job: Any) -> None:
    if job.result is None or all(verdict is Verdict.OK for verdict in job.result.verdicts):
        original(self, job)


@bug("events agree with the tiers", seed=20)
@around(JobTable, "without_removed")
def stored_is_told_after_removed(
    original: Any, self: Any, store: Any, keys: list[bytes]
) -> list[bytes]:
    original(self, store, keys)
    return keys


@bug("the policy knows exactly the readable chunks")
@around(LRUPolicy, "choose_victims")
def a_policy_chooses_what_is_pinned(original: Any, self: Any, count: int, is_evictable: Any) -> Any:
    return original(self, count, lambda key: True)


@bug("nothing waits for ever", "an answer is true")
def a_request_waits_on_for_what_has_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Wait, "is_over", lambda self, now_s: False)


# --- hints ----------------------------------------------------------------------------------


@bug("a pinned chunk stays")
@around(PrimaryTier, "victims")
def a_pin_is_evicted(original: Any, self: Any, count: int, *, owed: bool) -> Any:
    held = self.leases.held
    self.leases.held = {key: lease for key, lease in held.items() if lease.priority is not None}
    victims = original(self, count, owed=owed)
    self.leases.held = held
    return victims


@bug("no lease outlives its end", "a tenant gets its share")
def a_lease_does_not_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "expire", lambda self, now_s: None)


@bug("a lease has its terms", "a lease lasts until its end")
def a_hit_does_not_renew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "renew", lambda self, keys, now_s: None)


@bug("a lease has its terms", "a pinned chunk stays")
def a_longer_retained_range_replaces_a_pin(patch: pytest.MonkeyPatch) -> None:
    def is_better(self: Any, old: Lease, old_s: float, new: Lease, new_s: float) -> bool:
        return (old.tenant, old.owner) != (new.tenant, new.owner) and old_s >= new_s

    patch.setattr(Leases, "_is_better", is_better)


@bug("leases stay within their budget")
@around(TieringManager, "limit_hints")
def the_budget_is_off_by_one(original: Any, self: Any, share: float, duration_s: float) -> None:
    original(self, share, duration_s)
    self._primary.leases.budget += 1


@bug("leases stay within their budget")
@around(HintExecutor, "_keep_prefetched")
def a_prefetch_ignores_the_budget(original: Any, self: Any, prefetch: Any, keys: Any) -> Any:
    self._leases.budget += len(keys)
    kept = original(self, prefetch, keys)
    self._leases.budget -= len(keys)
    return kept


@bug("a tenant gets its share", seed=13)
def a_tenant_keeps_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leases, "_make_room", lambda self, own, keys: self.budget - len(self.held))


@bug("a lease lasts until its end", "a tenant keeps its share", "a pinned chunk stays")
@around(Leases, "_make_room")
def a_tenant_takes_all(original: Any, self: Leases, own: Any, keys: Any) -> int:
    room: int = original(self, own, keys)
    for other in self._until_s.values():
        while room < len(keys) and other and other is not own:
            del self.held[other.popitem()[0]]
            room += 1
    return room


@bug("retained chunks go last, by their priority", seed=52)
@around(Leases, "retained")
def the_most_wanted_chunks_go_first(original: Any, self: Leases) -> Any:
    return original(self)[::-1]


@bug("promotions leave room to stores", seed=55)
@around(Promotions, "start")
def promotions_ignore_leases(original: Any, self: Any, *arguments: Any) -> Any:
    held = len(self._primary.leases.held)
    self._limit += held
    started = original(self, *arguments)
    self._limit -= held
    return started


@bug(
    "a lease lasts until its end",
    "no lease outlives its end",
    "leased chunks are in the pool",
    seed=25,
)
@around(TieringManager, "reset_cache")
def a_reset_keeps_leases(original: Any, self: Any, scope: Any) -> None:
    leases, self._primary.leases = self._primary.leases, Leases(0)
    self._hints._leases = self._primary.leases
    original(self, scope)
    self._primary.leases = self._hints._leases = leases


@bug("a prefetch waits for loads", seed=10)
def a_prefetch_starts_beside_a_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetcher, "_is_loading", lambda self: False)


@bug("a prefetch loads few chunks at once")
@around(Prefetcher, "__init__")
def a_prefetch_loads_all_at_once(original: Any, self: Any, *arguments: Any, **named: Any) -> None:
    original(self, *arguments, **named)
    self._window = 64


@bug("at rest nothing is left", "each pin has its owner", "a prefetch loads few chunks at once")
@around(Prefetcher, "_carry_on")
def a_prefetch_forgets_its_claims(original: Any, self: Any, prefetch: Any) -> None:
    promotions = self._search.promotions
    abandon, promotions.abandon = promotions.abandon, lambda state: None
    original(self, prefetch)
    promotions.abandon = abandon


@bug("counts add up", "the manager never raises")
@around(Prefetcher, "_begin")
def a_prefetch_counts_misses(original: Any, self: Any, prefetch: Any) -> Any:
    state = original(self, prefetch)
    state.is_prefetch = False
    return state


@bug("a turn ends its prefetch")
def a_turn_leaves_its_prefetch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefetcher, "drop", lambda self, tenant, session: None)


@bug("each hint has its receipts", "a turn ends its prefetch")
@around(HintExecutor, "_note_prefetched")
def a_prefetch_has_no_last_receipt(original: Any, self: Any, prefetch: Any, why: str) -> None:
    if not why:
        original(self, prefetch, why)


@bug("no tier gets what an ended request stored")
@around(Cascade, "stored")
def an_ended_requests_chunks_are_stored(
    original: Any, self: Any, slots: Any, request: RequestContext
) -> None:
    original(self, slots, replace(request, is_over=False))


@pytest.mark.parametrize("name", BUGS)
def test_the_simulation_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rules, first, make = BUGS[name]
    make(monkeypatch)
    found = next(filter(None, map(breach_of, (first, *range(SEEDS)))), None)
    assert found is not None, f"not found within {SEEDS} seeds"
    print(f"{name}: {found}")
    assert found.rule in rules


def breach_of(seed: int) -> Breach | None:
    try:
        simulate(seed)
    except Breach as breach:
        return breach
    return None
