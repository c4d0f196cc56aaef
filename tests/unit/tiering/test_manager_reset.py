from __future__ import annotations

import asyncio
import itertools

import pytest
from support.engine import KEYS, A, B, FaultyTier, Make, start_promotion, stored_below

from kvtier_sdk import Capability, TierUnavailableError
from kvtier_sdk.tiering.outputs import ResetScope


def test_nothing_is_found_after_a_reset(make: Make) -> None:
    engine = make(tiers=0)
    engine.store(A, *KEYS[:3])
    engine.manager.take_events()
    engine.manager.reset_cache()
    assert engine.look(B, KEYS[0]) == ["MISS"]
    assert engine.manager.usage().free == 8
    [event] = engine.manager.take_events()
    assert (event.removed, set(event.keys)) == (True, set(KEYS[:3]))


def test_a_purge_forgets_at_the_next_step_and_waits_for_what_is_in_use(make: Make) -> None:
    engine = make(tiers=0)
    engine.store(A, *KEYS[:3])
    engine.step()
    engine.manager.take_events()
    assert engine.look(B, KEYS[0]) == ["HIT"]
    engine.manager.prepare_load(KEYS[:1], B)
    purge = engine.manager.purge_pool()
    assert engine.look(B, KEYS[1]) == ["HIT"], "the step has begun"
    engine.manager.prepare_load(KEYS[1:2], B)
    writing = engine.manager.prepare_store(KEYS[3:4], A)
    assert purge.left is None
    engine.step()
    assert engine.look(B, KEYS[2]) == ["MISS"]
    assert (purge.forgotten, purge.left) == (1, [KEYS[0], KEYS[1], KEYS[3]])
    engine.manager.complete_load(KEYS[:2], B)
    engine.manager.complete_store(writing.keys_to_store, A)
    engine.store(A, KEYS[4])
    engine.step()
    assert engine.look(B, *KEYS[:5]) == ["MISS", "MISS", "MISS", "MISS", "HIT"]
    assert (purge.forgotten, purge.left) == (4, [])
    removed = [event.keys for event in engine.manager.take_events() if event.removed]
    assert sorted(key for keys in removed for key in keys) == sorted(KEYS[:4])
    engine.at_rest()


def test_what_a_purge_forgets_goes_to_no_tier(make: Make) -> None:
    engine = make(store_policy="on_evict")
    engine.store(A, *KEYS[:3])
    engine.manager.purge_pool()
    engine.push_out(A)
    stored = [keys for operation, keys in engine.tiers[0].calls if operation == "store"]
    assert {*KEYS[:3]}.isdisjoint(itertools.chain(*stored))


def test_a_chunk_on_its_way_into_a_tier_is_purged_once_it_is_there(make: Make) -> None:
    engine = make()
    gate = engine.tiers[0].gate = asyncio.Event()
    engine.store(A, KEYS[0])
    engine.step()
    purge = engine.manager.purge_pool()
    engine.step(times=2)
    assert purge.left == KEYS[:1]
    gate.set()
    engine.at_rest()
    assert (purge.left, purge.forgotten) == ([], 1)


def test_a_load_that_was_not_handed_over_is_withdrawn(make: Make) -> None:
    engine = make()
    start_promotion(engine, KEYS[0])
    engine.tiers[0].calls.clear()
    engine.manager.reset_cache()
    assert engine.manager.usage().free == 8
    engine.at_rest()
    assert "load" not in [name for name, _ in engine.tiers[0].calls]


def test_requests_live_on_and_those_that_ended_do_not(make: Make) -> None:
    engine = make(tiers=0)
    engine.manager.prepare_store([KEYS[0]], A)
    engine.manager.on_request_finished(A)
    engine.manager.reset_cache()
    engine.manager.on_new_request(A)
    engine.manager.on_reset_flushed()
    engine.store(B, KEYS[1])
    engine.at_rest()


def test_a_reset_of_all_empties_the_tiers(make: Make) -> None:
    engine = make(tiers=2)
    stored_below(engine, *KEYS[:3])
    engine.manager.take_events()
    engine.manager.reset_cache(ResetScope.ALL)
    assert engine.look(B, KEYS[0]) == ["MISS"], "cold when it returns"
    assert engine.manager.stats[0].misses["unavailable"] == 1
    engine.step()
    engine.manager.on_schedule_end()
    gone = {event.tier: set(event.keys) for event in engine.manager.take_events() if event.removed}
    assert gone["tier0"] >= set(KEYS[:3])
    assert engine.settle(B, KEYS[1]) == ["MISS"]
    assert engine.manager.stats[0].misses["absent"] == 1
    engine.store(B, KEYS[0])
    engine.step()
    assert [len(tier._objects) for tier in engine.tiers] == [1, 1]


def test_a_tier_that_could_not_be_emptied_is_not_used_until_it_was(make: Make) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    engine.tiers[0].scan_error = TierUnavailableError("down")
    engine.manager.reset_cache(ResetScope.ALL)
    engine.step()
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    assert engine.manager.stats[1].failures == {"purge.unavailable": 1}
    engine.store(B, KEYS[1])
    dropped = {"lookup.unavailable": 1, "store.unavailable": 1}
    assert engine.manager.stats[1].dropped == dropped
    engine.tiers[0].scan_error = None
    engine.step(31.0)
    engine.step(times=2)
    assert not engine.tiers[0]._objects
    engine.store(B, KEYS[2])
    engine.step()
    assert engine.tiers[0]._objects


def test_a_tier_that_cannot_delete_is_out_of_use_after_a_reset_of_all(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FaultyTier, "capabilities", Capability.SCAN)
    engine = make()
    stored_below(engine, KEYS[0])
    engine.manager.reset_cache(ResetScope.ALL)
    assert "tier tier0 cannot list and delete its chunks" in caplog.text
    for _ in range(3):
        engine.step(60.0)
        assert engine.settle(B, KEYS[0]) == ["MISS"]
