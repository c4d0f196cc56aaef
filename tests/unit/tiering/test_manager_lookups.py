from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.core import pure_core_only
from support.engine import CHUNK_BYTES, KEYS, A, B, Engine, Make, stored_below

from kvtier_sdk import (
    CorruptChunkError,
    LookupResult,
    OffloadKey,
    RequestContext,
    make_offload_key,
    split_offload_key,
)

CHOOSY = RequestContext("choosy")


def misses(engine: Engine) -> dict[str, int]:
    return dict(engine.manager.stats[0].misses)


def test_absent_is_counted_once_a_chunk_and_request(make: Make) -> None:
    engine = make()
    for _ in range(3):
        assert engine.settle(A, KEYS[0]) == ["MISS"]
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    assert misses(engine) == {"absent": 2}
    assert engine.tiers[0].called() == ["lookup"] * 2, "a miss costs no second question"


def two_tiers_with_a_chunk_each(make: Make) -> Engine:
    engine = make(tiers=2)
    stored_below(engine, *KEYS[:2])
    for tier, key in zip(engine.tiers, reversed(KEYS[:2]), strict=True):
        tier._remove([key])
        tier.calls.clear()
    return engine


def test_a_request_is_served_by_the_tiers_that_may_be_asked_for_it(make: Make) -> None:
    engine = two_tiers_with_a_chunk_each(make)
    picky = RequestContext("picky")
    engine.manager.on_new_request(CHOOSY, ["tier1"])
    assert engine.settle(CHOOSY, *KEYS[:2]) == ["MISS", "HIT"]
    engine.manager.on_new_request(picky, [])
    assert engine.settle(picky, KEYS[0]) == ["MISS"]
    assert engine.tiers[0].calls == []
    # Any request finds promoted chunks. Request A may ask both tiers, so it also finds KEYS[0].
    assert engine.settle(picky, KEYS[1]) == ["HIT"]
    assert engine.settle(A, *KEYS[:2]) == ["HIT", "HIT"]
    assert misses(engine) == {"absent": 2}


def test_requests_that_may_ask_different_tiers_share_no_answer(make: Make) -> None:
    engine = two_tiers_with_a_chunk_each(make)
    engine.manager.on_new_request(CHOOSY, ["tier1"])
    assert engine.look(CHOOSY, KEYS[0]) == engine.look(A, KEYS[0]) == ["RETRY"]
    engine.step()
    assert engine.look(CHOOSY, KEYS[0]) == ["MISS"]
    assert engine.settle(A, KEYS[0]) == ["HIT"]


def test_a_request_that_joined_a_load_falls_through_to_all_of_its_own_tiers(make: Make) -> None:
    engine = make(tiers=2)
    stored_below(engine, KEYS[0])
    engine.tiers[0].on_load = lambda transfer: CorruptChunkError("flipped")
    engine.manager.on_new_request(CHOOSY, ["tier0"])
    engine.look(CHOOSY, KEYS[0])
    engine.step()
    assert engine.look(CHOOSY, KEYS[0]) == engine.look(B, KEYS[0]) == ["HIT_PENDING"]
    assert engine.settle(B, KEYS[0]) == ["HIT"]
    assert engine.look(CHOOSY, KEYS[0]) == ["HIT"], "what is there is there for all"


def test_a_failed_load_counts_for_all_who_were_answered_before_it(make: Make) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    engine.tiers[0].on_load = lambda transfer: CorruptChunkError("flipped")
    engine.manager.on_new_request(CHOOSY, ["tier0"])
    engine.look(B, KEYS[0])
    engine.look(CHOOSY, KEYS[0])
    engine.step()
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    assert engine.look(CHOOSY, KEYS[0]) == ["MISS"]
    engine.step()
    assert engine.tiers[0].called().count("load") == 1
    engine.at_rest()


def test_what_another_tier_has_does_not_end_the_wait_for_an_own_one(make: Make) -> None:
    engine = make(tiers=3)
    stored_below(engine, KEYS[0])
    slow, failing, _ = engine.tiers
    slow.gate, slow.gated = asyncio.Event(), {"lookup"}
    failing.on_load = lambda transfer: CorruptChunkError("flipped")
    engine.manager.on_new_request(CHOOSY, ["tier0"])
    engine.look(B, KEYS[0])
    engine.step()
    assert engine.look(B, KEYS[0]) == engine.look(CHOOSY, KEYS[0]) == ["HIT_PENDING"]
    engine.manager.on_request_finished(B)
    engine.step()
    assert engine.look(CHOOSY, KEYS[0]) == ["RETRY"]
    slow.gate.set()
    assert engine.settle(CHOOSY, KEYS[0]) == ["HIT"]
    assert engine.manager.prepare_load(KEYS[:1], CHOOSY).sources == [0]
    engine.manager.complete_load(KEYS[:1], CHOOSY)
    engine.at_rest()


def test_time_in_which_an_engine_slept_does_not_count_as_waiting(make: Make) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    engine.at_rest()
    assert not engine.manager.has_pending_work(), "the last that an engine asks before it sleeps"
    engine.clock.advance(60.0)
    engine.tiers[0].gate, engine.tiers[0].gated = asyncio.Event(), {"lookup"}
    assert engine.look(B, KEYS[0]) == ["RETRY"]
    engine.step()
    assert engine.look(B, KEYS[0]) == ["RETRY"]
    engine.tiers[0].gate.set()
    assert engine.settle(B, KEYS[0]) == ["HIT"]
    assert misses(engine) == {}


def test_no_room_for_a_promotion(make: Make) -> None:
    engine = make(slots=2)
    stored_below(engine, KEYS[0])
    engine.manager.prepare_store(KEYS[1:3], A)
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    assert misses(engine) == {"primary_full": 1}
    engine.manager.complete_store(KEYS[1:3], A, success=False)


def test_no_room_in_the_queue_of_loads(make: Make) -> None:
    engine = make(max_queue=str(CHUNK_BYTES))
    for key in KEYS[:2]:
        stored_below(engine, key)
    assert engine.look(B, *KEYS[:2]) == ["RETRY"] * 2
    engine.step()
    assert engine.look(B, *KEYS[:2]) == ["HIT_PENDING", "MISS"]
    assert misses(engine)["queue_full"] == 1


def slow_below(make: Make, **manager: Any) -> Engine:
    """Return an engine that has measured its tier: a chunk takes 10 ms."""
    engine = make(manager=manager, load_deadline="10s", lookup_deadline="1s")
    stored_below(engine, *KEYS[:4])
    config = engine.tiers[0].config
    engine.tiers[0].config = config.model_copy(update={"latency_s": 0.01})
    engine.manager.lookup(KEYS[0], A)
    engine.step(0.02)
    engine.manager.lookup(KEYS[0], A)
    engine.step(0.01)
    engine.manager.on_schedule_end()
    return engine


@pytest.mark.parametrize(
    ("manager", "answer"),
    [({"recompute_s": 0.001}, "MISS"), ({"recompute_s": 0.1}, "HIT_PENDING"), ({}, "HIT_PENDING")],
)
def test_loading_more_slowly_than_recomputing_is_a_miss(
    make: Make, manager: dict[str, float], answer: str
) -> None:
    engine = slow_below(make, **manager)
    assert engine.look(B, *KEYS[1:4]) == ["RETRY"] * 3
    engine.step(0.02)
    assert engine.look(B, *KEYS[1:4]) == [answer] * 3
    assert misses(engine).get("slower_than_recompute", 0) == (3 if answer == "MISS" else 0)


def test_a_judgement_that_nothing_confirms_is_forgotten(make: Make) -> None:
    engine = slow_below(make, recompute_s=0.001)
    engine.step(30.0)
    engine.look(B, *KEYS[1:4])
    engine.step(0.02)
    assert engine.look(B, *KEYS[1:4]) == ["HIT_PENDING"] * 3


@pytest.mark.parametrize(("one_copy", "answer"), [(True, "HIT_PENDING"), (False, "HIT")])
def test_one_copy_can_serve_two_requests(make: Make, one_copy: bool, answer: str) -> None:
    engine = make(tiers=0, manager={"one_copy": one_copy})
    engine.store(A, KEYS[0])
    engine.look(A, KEYS[0])
    engine.manager.prepare_load([KEYS[0]], A)
    assert engine.look(B, KEYS[0]) == [answer]
    assert engine.look(A, KEYS[0]) == ["HIT"]
    engine.manager.complete_load([KEYS[0]], A)
    assert engine.look(B, KEYS[0]) == ["HIT"]


def test_groups_are_prefixes_of_their_own(make: Make) -> None:
    engine = make(slots=16)
    hashes = [split_offload_key(key)[0] for key in KEYS[:3]]
    groups = [[make_offload_key(chain_hash, group) for chain_hash in hashes] for group in (0, 1)]
    stored_below(engine, *groups[0], *groups[1][:2])
    for _ in range(3):
        found = [engine.manager.lookup_prefix(keys, B) for keys in groups]
        engine.step()
    assert found == [(3, False), (2, False)]
    engine.look(B, *groups[0], *groups[1][:2])
    engine.load(B, *groups[0], *groups[1][:2])
    engine.at_rest()


def test_what_was_found_behind_a_chunk_is_brought_with_it(make: Make) -> None:
    engine = make()
    stored_below(engine, *KEYS[:4])
    engine.look(B, *KEYS[:4])
    engine.step()
    assert engine.manager.lookup(KEYS[0], B) is LookupResult.HIT_PENDING
    engine.step()
    assert engine.tiers[0].calls[-1] == ("load", KEYS[:4])
    engine.manager.on_request_finished(B)
    engine.at_rest()


def test_what_another_request_asked_for_is_not_brought_for_this_one(make: Make) -> None:
    engine = make()
    stored_below(engine, *KEYS[:4])
    engine.look(A, *KEYS[:4])
    assert engine.look(B, KEYS[1]) == ["RETRY"]
    engine.step()
    assert engine.look(B, KEYS[1]) == ["HIT_PENDING"]
    engine.step()
    assert engine.tiers[0].calls[-1] == ("load", [KEYS[1]])
    engine.manager.on_request_finished(A)
    engine.manager.on_request_finished(B)
    engine.at_rest()


def gated(make: Make, *keys: OffloadKey) -> Engine:
    """Return an engine whose tier has ``keys``. Lookups wait for the tier's gate."""
    engine = make()
    stored_below(engine, *keys)
    engine.tiers[0].gated.add("lookup")
    engine.tiers[0].gate = asyncio.Event()
    return engine


def test_a_request_waits_until_a_tier_has_answered_and_until_its_chunk_is_there(make: Make) -> None:
    engine = gated(make, *KEYS[:2])
    manager = engine.manager
    assert not manager.is_waiting(B)
    for answer in ("RETRY", "HIT_PENDING"):
        engine.tiers[0].gate = gate = asyncio.Event()
        assert engine.look(B, *KEYS[:2]) == [answer] * 2
        for _ in range(2):
            engine.step()
            assert manager.is_waiting(B)
        gate.set()
        engine.step()
        assert not manager.is_waiting(B)
    assert engine.look(B, *KEYS[:2]) == ["HIT"] * 2
    engine.step()
    assert not manager.is_waiting(B)


def test_a_wait_ends_at_the_lookup_deadline(make: Make) -> None:
    engine = gated(make)
    assert engine.look(A, KEYS[0]) == ["RETRY"]
    engine.step(1.0)
    assert not engine.manager.is_waiting(A)
    assert engine.look(A, KEYS[0]) == ["MISS"]


@pure_core_only
def test_a_waiting_prefix_costs_no_lookup(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gated(make)
    engine.store(A, KEYS[0])
    keys = KEYS[:3]
    assert engine.manager.lookup_prefix(keys, A) == (1, True)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "lookup", None)
        assert engine.manager.lookup_prefix(keys, A) == (1, True)
    # A prefix of another length needs a new lookup.
    assert engine.manager.lookup_prefix(KEYS[:1], A) == (1, False)


def limited(make: Make, limit: int) -> Engine:
    engine = gated(make)
    engine.manager._search.lookups.limit = limit
    return engine


def test_requests_beyond_the_limit_wait_for_earlier_answers(make: Make) -> None:
    engine = limited(make, 2)
    manager, tier = engine.manager, engine.tiers[0]
    # One request can exceed the limit, because its whole prefix is looked up in one step.
    assert engine.look(A, *KEYS[:3]) == ["RETRY"] * 3
    assert not manager.is_put_off(A)
    assert engine.look(B, KEYS[3]) == ["RETRY"]
    assert manager.is_put_off(B)
    assert manager.is_waiting(B)
    assert manager.lookup_prefix(KEYS[3:5], B) == (0, True)
    engine.step()
    assert [keys for call, keys in tier.calls if call == "lookup"] == [list(KEYS[:3])]
    assert manager.is_waiting(B)
    tier.gate.set()
    engine.step()
    assert not manager.is_waiting(B)
    assert engine.look(A, *KEYS[:3]) == ["MISS"] * 3
    assert engine.settle(B, KEYS[3]) == ["MISS"]


def test_a_request_that_is_put_off_has_the_chunks_of_the_primary_tier(make: Make) -> None:
    engine = limited(make, 1)
    engine.store(A, *KEYS[4:6])
    engine.look(A, KEYS[0])
    assert engine.look(B, *KEYS[4:6]) == ["HIT"] * 2
    assert not engine.manager.is_put_off(B)
    assert engine.manager.lookup_prefix(KEYS[4:7], B) == (2, True)
    assert engine.manager.is_put_off(B)


@pytest.mark.parametrize("ends", ["deadline", "reset"])
def test_a_turn_comes_though_the_earlier_request_has_gone(make: Make, ends: str) -> None:
    engine = limited(make, 1)
    manager = engine.manager
    engine.look(A, KEYS[0])
    engine.look(B, KEYS[1])
    if ends == "reset":
        manager.reset_cache()
    manager.on_request_finished(A)
    engine.step(0.0 if ends == "reset" else 1.0)
    assert not manager.is_waiting(B)
    engine.look(B, KEYS[1])
    assert not manager.is_put_off(B)


def test_chunks_that_another_request_asked_for_count_too(make: Make) -> None:
    engine = limited(make, 5)
    shared = KEYS[:2]
    requests = [RequestContext(f"r{index}") for index in range(4)]
    for request in requests:
        engine.manager.on_new_request(request)
        engine.look(request, *shared)
    # Each request looks up two chunks. After three requests, six lookups exceed the limit of five.
    assert [engine.manager.is_put_off(each) for each in requests] == [False] * 3 + [True]
    engine.step()
    engine.look(requests[3], *shared)
    assert not engine.manager.is_put_off(requests[3])
