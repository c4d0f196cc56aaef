from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.engine import CHUNK_BYTES, KEYS, A, B, Engine, Make

from kvtier_sdk import (
    ConfigError,
    RequestContext,
    TierError,
    load_store_policy,
)


def below(engine: Engine, tier: int = 0) -> set[bytes]:
    return set(engine.tiers[tier]._objects)


def use(engine: Engine, *keys: bytes) -> None:
    assert engine.look(B, *keys) == ["HIT"] * len(keys)
    engine.load(B, *keys)
    engine.at_rest()


def test_on_evict_a_tier_gets_what_leaves_and_nothing_else(make: Make) -> None:
    engine = make(slots=4, store_policy="on_evict", manager={"store_reserve": 0.0})
    engine.store(A, *KEYS[:4])
    engine.step()
    output = engine.manager.prepare_store(KEYS[4:7], A)
    assert output.rejected_keys, "a chunk that is owed to the tier is not evicted before"
    engine.manager.complete_store(output.keys_to_store, A)
    engine.step(times=2)
    assert engine.manager.prepare_store(output.rejected_keys, A).rejected_keys == []
    engine.manager.complete_store(output.rejected_keys, A)
    engine.at_rest()
    evicted = {key for e in engine.manager.take_events() if e.removed for key in e.keys}
    assert below(engine) == evicted
    assert evicted >= set(KEYS[2:4])
    assert [engine.settle(B, key) for key in KEYS[:2]] == [["HIT"]] * 2


def test_on_evict_the_headroom_is_kept_by_a_cadence_of_its_own(make: Make) -> None:
    engine = make(slots=10, store_policy="on_evict", manager={"store_reserve": 0.3})
    engine.store(A, *KEYS[:10])
    engine.at_rest()
    assert engine.manager.usage().free == 3
    assert below(engine) == set(KEYS[7:10])


def test_on_evict_what_a_tier_has_is_not_written_to_it_again(make: Make) -> None:
    engine = make(slots=4, store_policy="on_evict", manager={"store_reserve": 0.25})
    engine.store(A, *KEYS[:4])
    engine.at_rest()
    assert below(engine) == {KEYS[3]}
    assert engine.settle(B, *KEYS[:4]) == ["HIT"] * 4
    engine.load(B, *KEYS[:4])
    engine.at_rest()
    stored = [key for name, keys in engine.tiers[0].calls if name == "store" for key in keys]
    assert len(stored) == len(set(stored))


def test_on_evict_a_tier_that_fails_does_not_fill_the_pool(make: Make) -> None:
    engine = make(slots=4, store_policy="on_evict")
    engine.tiers[0].on_store = lambda transfer: TierError("no")
    for start in range(0, 16, 2):
        engine.store(A, *KEYS[start : start + 2])
        engine.step(times=2)
    assert engine.settle(B, KEYS[14]) == ["HIT"]
    assert engine.manager.stats[1].failures["store.failed"] > 0
    engine.manager.on_request_finished(B)
    engine.at_rest()


def test_on_evict_a_tier_of_whole_requests_gets_stores_that_make_no_room(make: Make) -> None:
    engine = make(store_policy="on_evict", offload_policy="request")
    engine.store(A, *KEYS[:2])
    engine.store(B, *KEYS[:2])
    engine.at_rest()
    assert below(engine) == set(KEYS[:2])


def test_on_evict_and_through_side_by_side(make: Make) -> None:
    policies = ({"store_policy": "on_evict"}, {})
    engine = make(slots=4, tiers=2, each=policies, manager={"store_reserve": 0.5})
    for start in range(0, 12, 2):
        engine.store(A, *KEYS[start : start + 2])
        engine.at_rest()
    assert below(engine, 1) == set(KEYS[:12])
    assert below(engine, 0) < set(KEYS[:12])
    assert below(engine, 0)


def test_after_hits_a_tier_gets_what_came_back_that_often(make: Make) -> None:
    engine = make(store_policy="after_hits:2")
    engine.store(A, *KEYS[:2])
    for times in (1, 2, 3):
        use(engine, KEYS[0])
        assert below(engine) == (set() if times < 2 else {KEYS[0]})
    assert [name for name, _ in engine.tiers[0].calls].count("store") == 1, "once is enough"


def test_after_hits_what_could_not_be_stored_is_offered_at_the_next_hit(make: Make) -> None:
    engine = make(store_policy="after_hits:1", retries=0)
    engine.store(A, KEYS[0])
    engine.tiers[0].raises = TierError("a moment of trouble")
    for stored in (set(), {KEYS[0]}, {KEYS[0]}):
        use(engine, KEYS[0])
        assert below(engine) == stored
    assert engine.tiers[0].called().count("store") == 2


def test_a_tier_of_whole_requests_gets_what_is_there_already(make: Make) -> None:
    engine = make(tiers=2, each=({"offload_policy": "request"}, {}))
    engine.store(A, *KEYS[:2])
    engine.at_rest()
    for tier in engine.tiers:
        tier._remove(KEYS[:2])
    assert engine.settle(B, *KEYS[:2]) == ["HIT"] * 2
    engine.load(B, KEYS[0])
    engine.store(B, *KEYS[1:3])
    engine.at_rest()
    assert below(engine, 0) == set(KEYS[:3])
    assert below(engine, 1) == {KEYS[2]}


def test_a_tier_of_whole_requests_gets_what_is_still_in_flight(make: Make) -> None:
    engine = make(offload_policy="request")
    engine.manager.prepare_store([KEYS[0]], A)
    assert engine.manager.prepare_store(KEYS[:2], B).keys_to_store == [KEYS[1]]
    engine.manager.complete_store([KEYS[1]], B)
    engine.at_rest_with(writing=1)
    assert below(engine) == {KEYS[1]}
    engine.manager.complete_store([KEYS[0]], A)
    engine.at_rest()
    assert below(engine) == set(KEYS[:2])
    stored = [key for name, keys in engine.tiers[0].calls if name == "store" for key in keys]
    assert sorted(stored) == sorted(KEYS[:2]), "once each, for A or for B"


def test_a_tier_of_whole_requests_is_sent_a_chunk_once(make: Make) -> None:
    engine = make(slots=64, offload_policy="request")
    engine.store(A, *KEYS[:50])
    engine.at_rest()
    for turn in range(100):
        request = RequestContext(f"hit-{turn}")
        engine.manager.on_new_request(request)
        assert engine.look(request, *KEYS[:50]) == ["HIT"] * 50
        engine.load(request, *KEYS[:50])
        assert engine.manager.prepare_store(KEYS[:50], request).keys_to_store == []
        engine.manager.on_request_finished(request)
        engine.at_rest()
    stored = [key for name, keys in engine.tiers[0].calls if name == "store" for key in keys]
    assert sorted(stored) == sorted(KEYS[:50])


@pytest.mark.parametrize("beside", [{}, {"store_policy": "after_hits:9"}])
def test_through_a_failed_store_is_offered_again(make: Make, beside: dict[str, str]) -> None:
    engine = make(tiers=2, each=({"retries": 0}, beside))
    engine.tiers[0].on_store = lambda t: TierError("no") if t.key == KEYS[1] else None
    engine.store(A, *KEYS[:3])
    engine.at_rest()
    assert below(engine) == {KEYS[0], KEYS[2]}
    stats = engine.manager.stats[1]
    assert (stats.stored_chunks, stats.failures) == (2, {"store.failed": 1})
    engine.tiers[0].on_store = lambda transfer: None
    for _ in range(2):
        use(engine, *KEYS[:3])
        assert below(engine) == set(KEYS[:3])
    stored = [keys for name, keys in engine.tiers[0].calls if name == "store"]
    assert stored == [list(KEYS[:3]), [KEYS[1]]]


@pytest.mark.parametrize("options", [{}, {"offload_policy": "request"}])
def test_what_a_full_queue_dropped_is_offered_again(make: Make, options: dict[str, str]) -> None:
    engine = make(max_queue=2 * CHUNK_BYTES, **options)
    engine.store(A, *KEYS[:3])
    engine.at_rest()
    assert below(engine) == set(KEYS[:2])
    use(engine, *KEYS[:3])
    assert below(engine) == set(KEYS[:3])


def test_a_preempted_request_comes_back_with_its_store_in_flight(make: Make) -> None:
    engine = make()
    engine.tiers[0].gate = asyncio.Event()
    engine.store(A, *KEYS[:2])
    engine.manager.on_schedule_end(preempted_request_ids=["a"])
    engine.step()
    assert engine.look(A, *KEYS[:2]) == ["HIT"] * 2
    engine.load(A, *KEYS[:2])
    assert engine.manager.prepare_store(KEYS[:3], A).keys_to_store == [KEYS[2]]
    engine.manager.complete_store([KEYS[2]], A)
    engine.tiers[0].gate.set()
    engine.at_rest()
    assert below(engine) == set(KEYS[:3])


def test_of_tenant_a_tier_gets_the_chunks_of_one_tenant(make: Make) -> None:
    engine = make(store_policy="of_tenant:acme")
    for start, tenant in enumerate(["acme", "globex", ""]):
        request = RequestContext(f"of {tenant}", tenant=tenant)
        engine.manager.on_new_request(request)
        engine.store(request, *KEYS[2 * start : 2 * start + 2])
        engine.manager.on_request_finished(request)
    engine.at_rest()
    assert below(engine) == set(KEYS[:2])


@pytest.mark.parametrize(
    "text", ["after_hits", "after_hits:0", "after_hits:x", "through:1", "of_tenant", "of_tenant:"]
)
def test_an_argument_that_means_nothing_is_told(text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_store_policy(text)


def test_contexts_of_one_id_are_one_request(make: Make) -> None:
    engine = make()
    engine.store(replace(A, params={"a": 1}), KEYS[0])
    engine.manager.on_request_finished(A)
    engine.at_rest()
