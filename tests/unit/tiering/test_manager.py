"""The manager with real tiers on a virtual clock; each test decides when a tier's loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from support.engine import KEYS, A, B, Engine, Make, start_promotion, stored_below

from kvtier_sdk import (
    ChunkNotFoundError,
    ConfigError,
    KVTierError,
    LookupResult,
    RequestContext,
)
from kvtier_sdk.policies.lru import LRUPolicy


@pytest.mark.parametrize("call", ["lookup", "prepare_store", "touch"])
@pytest.mark.parametrize("key", ["text", 5, None])
def test_a_key_that_is_no_bytes_is_refused(make: Make, call: str, key: Any) -> None:
    engine = make()
    method = getattr(engine.manager, call)
    # Accept both errors: the compiled core raises TypeError, and pure Python KVTierError.
    with pytest.raises((KVTierError, TypeError), match="bytes"):
        method(key if call == "lookup" else [KEYS[0], key], A)
    assert engine.store(A, *KEYS) == engine.pool.slots
    engine.at_rest()


def test_two_requests_share_one_question_and_one_load(make: Make) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    engine.tiers[0].calls.clear()
    for request in (A, B):
        assert engine.look(request, KEYS[0]) == ["RETRY"]
    engine.step()
    for request in (A, B):
        assert engine.look(request, KEYS[0]) == ["HIT_PENDING"]
    engine.step()
    for request in (A, B):
        assert engine.look(request, KEYS[0]) == ["HIT"]
        engine.load(request, KEYS[0])
    assert [call for call in engine.tiers[0].calls if call[0] != "store"] == [
        ("lookup", [KEYS[0]]),
        ("load", [KEYS[0]]),
    ]
    engine.at_rest()


def test_a_stuck_loop_is_given_up_by_the_manager(make: Make) -> None:
    engine = make(load_deadline="1s")
    start_promotion(engine, KEYS[0])
    engine.manager.on_schedule_end()  # hands the jobs over, without running the tier's loop
    engine.clock.advance(2.5)
    engine.manager.on_schedule_end()
    assert engine.look(B, KEYS[0]) == ["MISS"]
    assert engine.manager.usage().quarantined == 1
    engine.at_rest()


def test_completions_after_the_end_of_a_request_are_taken(make: Make) -> None:
    engine = make()
    output = engine.manager.prepare_store(KEYS[:2], A)
    engine.store(B, KEYS[2])
    engine.manager.prepare_load([KEYS[2]], B)
    engine.manager.on_request_finished(A)
    engine.manager.on_request_finished(B)
    engine.write(output)
    engine.manager.complete_store(set(KEYS[:2]), A)
    engine.manager.complete_load([KEYS[2]], B)
    engine.at_rest()
    assert set(engine.tiers[0]._objects) == set(KEYS[:3])
    with pytest.raises(KVTierError, match="unknown"):
        engine.manager.lookup(KEYS[0], A)


def test_when_the_pool_runs_out_the_first_keys_are_stored_and_the_others_named(make: Make) -> None:
    engine = make(slots=4)
    output = engine.manager.prepare_store(KEYS[:6], A)
    assert output.keys_to_store == KEYS[:4]
    assert output.rejected_keys == KEYS[4:6]
    assert engine.manager.stats[0].dropped == {"store.primary_full": 2}
    engine.manager.complete_store(KEYS[:4], A, success=False)
    assert engine.look(B, KEYS[0]) == ["RETRY"]
    engine.at_rest()


def test_the_start_of_a_prefix_is_the_last_to_go(make: Make) -> None:
    engine = make(slots=4, tiers=0)
    engine.store(A, *KEYS[:4])
    assert engine.manager.prepare_store(KEYS[4:6], A).evicted_keys == [KEYS[3], KEYS[2]]


def test_what_is_used_above_stays_warm_below(make: Make) -> None:
    engine = make()
    engine.store(A, *KEYS[:3])
    engine.step(times=2)
    assert engine.look(B, KEYS[0]) == ["HIT"]
    engine.load(B, KEYS[0])
    engine.step()
    assert list(engine.tiers[0]._used_s)[-1] == KEYS[0]


def test_a_preempted_request_asks_anew(make: Make) -> None:
    engine = make()
    assert engine.settle(A, KEYS[0]) == ["MISS"]
    stored_below(engine, KEYS[0])
    assert engine.look(A, KEYS[0]) == ["MISS"], "the answer of before holds within a request"
    engine.manager.on_schedule_end(preempted_request_ids=["a"])
    assert engine.settle(A, KEYS[0]) == ["HIT"]


def test_events_come_after_the_fact(make: Make) -> None:
    engine = make(slots=1)
    engine.store(A, KEYS[0])
    seen = [(e.tier, e.removed, list(e.keys)) for e in engine.manager.take_events()]
    assert seen == [("host", False, [KEYS[0]])]
    engine.step(times=2)
    engine.store(A, KEYS[1])
    seen = [(e.tier, e.removed, list(e.keys)) for e in engine.manager.take_events()]
    assert seen == [
        ("host", True, [KEYS[0]]),
        ("host", False, [KEYS[1]]),
        ("tier0", False, [KEYS[0]]),
    ]


def test_misuse_is_told(make: Make) -> None:
    engine = make()
    with pytest.raises(KVTierError, match="alive"):
        engine.manager.on_new_request(A)
    with pytest.raises(KVTierError, match="not readable"):
        engine.manager.prepare_load([KEYS[0]], A)
    with pytest.raises(ConfigError, match="tier0"):
        engine.add("tier0", {})
    engine.runners[-1].close(0.0)
    assert engine.manager.lookup(KEYS[0], A) is LookupResult.RETRY


def test_a_stalled_tier_leaves_half_of_the_pool_to_others(make: Make) -> None:
    engine = make(slots=8)
    engine.tiers[0].gate = asyncio.Event()
    for start in range(0, 12, 3):
        engine.store(A, *KEYS[start : start + 3])
        engine.step()
    assert engine.manager.usage().pinned == 4
    assert engine.manager.stats[1].dropped == {"store.queue_full": 8}
    assert engine.manager.stats[0].stored_chunks == 12
    engine.tiers[0].gate.set()
    engine.at_rest()


def test_an_interrupted_close_leaves_no_tier_open(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(tiers=3)
    closed: list[int] = []

    def interrupt(index: int, close: Callable[[float], None], timeout_s: float) -> None:
        close(timeout_s)
        closed.append(index)
        raise KeyboardInterrupt

    for index, runner in enumerate(engine.runners):
        monkeypatch.setattr(runner, "close", partial(interrupt, index, runner.close))
    with pytest.raises(KeyboardInterrupt):
        engine.manager.shutdown()
    assert closed == [0, 1, 2]


def test_the_policy_hears_last_that_a_request_has_ended(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If chunks arrive or are used after their request's end, the policy is told the end again."""
    told: list[tuple[str, str]] = []
    insert, access = LRUPolicy.on_insert, LRUPolicy.on_access

    def on_insert(self: LRUPolicy, keys: Any, request: RequestContext) -> None:
        told.append(("insert", request.request_id))
        insert(self, keys, request)

    def on_access(self: LRUPolicy, keys: Any, request: RequestContext) -> None:
        told.append(("access", request.request_id))
        access(self, keys, request)

    def on_request_finished(self: LRUPolicy, request: RequestContext, stop: str | None) -> None:
        told.append(("finished", request.request_id))

    for method in (on_insert, on_access, on_request_finished):
        monkeypatch.setattr(LRUPolicy, method.__name__, method)
    engine = make()
    start_promotion(engine, KEYS[0])
    told.clear()
    engine.manager.on_schedule_end()
    engine.manager.on_request_finished(B)
    engine.step()
    engine.step()
    assert told == [
        ("finished", B.request_id),
        ("insert", B.request_id),
        ("finished", B.request_id),
    ]
    told.clear()
    engine.manager.touch([KEYS[0]], B)
    engine.step()
    assert told == [("access", B.request_id), ("finished", B.request_id)]
    engine.at_rest()


def test_a_load_that_never_ends_is_a_miss_and_keeps_its_slot(make: Make) -> None:
    engine = make(load_deadline="5s")
    start_promotion(engine, KEYS[0])
    tier = engine.tiers[0]
    tier.gate, tier.stubborn = asyncio.Event(), True
    engine.step(6.0)
    assert engine.look(B, KEYS[0]) == ["MISS"]
    assert engine.manager.usage().quarantined == 1, "the call may still write the slot"
    engine.manager.on_request_finished(B)
    assert not engine.manager.has_pending_work(), "an engine does not spin for a hung call"
    tier.gate.set()
    engine.at_rest()


def test_a_deep_queue_of_requests_leaves_stores_their_room(make: Make) -> None:
    engine = make(slots=10, manager={"store_reserve": 0.2})
    stored_below(engine, *KEYS[:20])
    for start in range(0, 20, 4):
        names = engine.settle(B, *KEYS[start : start + 4])
        assert names == (["HIT"] * 4 if start < 8 else ["MISS"] * 4)
        output = engine.manager.prepare_store([KEYS[40 + start], KEYS[41 + start]], A)
        assert output.rejected_keys == []
        engine.manager.complete_store(output.keys_to_store, A)
        engine.step()
        engine.step()
    assert engine.look(B, *KEYS[:8]) == ["HIT"] * 8
    engine.load(B, *KEYS[:8])
    engine.at_rest()


def test_an_answer_does_not_outlive_its_request(make: Make) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    engine.look(A, KEYS[0])
    engine.step()
    engine.manager.on_request_finished(A)
    engine.tiers[0]._objects.clear()
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    engine.tiers[0].on_load = lambda transfer: ChunkNotFoundError("gone")
    engine.step()
    assert "load" not in [name for name, _ in engine.tiers[0].calls]
