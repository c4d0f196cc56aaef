"""Chunks that this process stored are loaded without a lookup."""

from __future__ import annotations

import asyncio

import pytest
from support.engine import KEYS, A, B, Engine, Make

from kvtier_sdk import CorruptChunkError, Job, Operation, RequestContext
from kvtier_sdk.engine import ResetScope
from kvtier_sdk.tiering.tier_record import KnownChunks


def with_known(make: Make, **options: object) -> Engine:
    engine = make(**options)
    engine.store(A, *KEYS[:4])
    engine.step(times=2)
    engine.push_out(A)
    for tier in engine.tiers:
        tier.calls.clear()
    return engine


def misses(engine: Engine) -> dict[str, int]:
    return dict(engine.manager.stats[0].misses)


def test_two_requests_of_one_step_share_the_load(make: Make) -> None:
    engine = with_known(make)
    assert engine.look(A, *KEYS[:4]) == engine.look(B, *KEYS[:4]) == ["RETRY"] * 4
    engine.step()
    assert engine.look(A, *KEYS[:4]) == engine.look(B, *KEYS[:4]) == ["HIT"] * 4
    assert engine.tiers[0].calls == [("load", KEYS[:4])]
    engine.load(A, *KEYS[:4])
    engine.load(B, *KEYS[:4])
    assert engine.manager.stats[1].hit_chunks == 4, "the load counts once"
    engine.at_rest()


def test_what_the_tier_has_reported_removed_is_asked_for(make: Make) -> None:
    engine = with_known(make)
    engine.tiers[0]._remove(KEYS[:1])
    engine.step()
    assert engine.look(B, *KEYS[:4]) == ["RETRY"] * 4
    engine.step()
    assert engine.look(B, *KEYS[:1]) == ["MISS"]
    # Because the first chunk needs a lookup, the chunks after it are looked up too.
    assert engine.tiers[0].calls == [("lookup", KEYS[:4])]
    assert misses(engine) == {"absent": 1}


def test_a_request_that_asks_again_after_a_load_knows_what_has_left_the_tier_since(
    make: Make,
) -> None:
    engine = with_known(make)
    engine.settle(B, KEYS[0])
    engine.load(B, KEYS[0])
    for key in KEYS[100 : 100 + 2 * engine.pool.slots]:
        engine.store(A, key)
        engine.step()
        engine.step()
    engine.tiers[0]._remove(KEYS[:1])
    engine.step()
    engine.tiers[0].calls.clear()
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    assert engine.tiers[0].called() == ["lookup"]


@pytest.mark.parametrize("operation", ["store", "load"])
def test_what_left_the_tier_while_a_job_moved_it_is_not_known(make: Make, operation: str) -> None:
    engine = make() if operation == "store" else with_known(make)
    tier, client = engine.tiers[0], engine.manager.clients[0]
    tier.gate, tier.gated = asyncio.Event(), {operation}
    if operation == "store":
        engine.store(A, *KEYS[:2])
    else:
        engine.look(B, *KEYS[:2])
    engine.step()
    tier.context.report_removed(KEYS[:1])
    engine.step()
    assert not client.knows(KEYS[0])
    tier.gate.set()
    engine.step(times=2)
    assert [client.knows(key) for key in KEYS[:2]] == [False, True]
    assert not client.jobs._gone


def test_removals_of_other_chunks_cost_a_waiting_job_no_memory(make: Make) -> None:
    engine = make()
    tier, client = engine.tiers[0], engine.manager.clients[0]
    tier.gate, tier.gated = asyncio.Event(), {"store"}
    engine.store(A, *KEYS[:2])
    engine.step()
    tier.context.report_removed(KEYS[1:100])
    engine.step()
    assert list(client.jobs._gone.values()) == [set(KEYS[1:2])]
    tier.gate.set()
    engine.step(times=2)


def test_a_load_does_not_fall_through_to_a_tier_that_the_chunk_has_left(make: Make) -> None:
    engine = with_known(make, tiers=2)
    first, second = engine.tiers
    first.gate, first.gated = asyncio.Event(), {"load"}
    first.on_load = lambda transfer: CorruptChunkError("damaged")
    engine.look(B, KEYS[0])
    engine.step()
    second._remove(KEYS[:1])
    engine.step()
    first.gate.set()
    engine.settle(B, KEYS[0])
    assert second.called() == ["lookup"]


def test_what_was_loaded_during_a_purge_is_not_known(make: Make) -> None:
    engine = with_known(make)
    tier, client = engine.tiers[0], engine.manager.clients[0]
    # Let the tier delete chunks without reporting them.
    tier._remove = lambda keys: None  # type: ignore[method-assign]
    tier.gate, tier.gated = asyncio.Event(), {"load"}
    engine.look(B, *KEYS[:2])
    engine.step()
    engine.manager.reset_cache(ResetScope.ALL)
    engine.step(times=2)
    assert client.takes_reads, "the purge is over"
    tier.gate.set()
    engine.step(times=2)
    assert not any(map(client.knows, KEYS[:2]))


def test_a_chunk_lost_in_silence_is_a_miss_and_nothing_is_known_any_more(make: Make) -> None:
    engine = with_known(make)
    del engine.tiers[0]._objects[KEYS[0]]
    assert engine.settle(B, *KEYS[:4]) == ["MISS", "HIT", "HIT", "HIT"]
    assert misses(engine) == {"absent": 1}
    assert engine.manager.stats[1].failures["load.not_found"] == 1
    assert engine.tiers[0].called() == ["load", "lookup"]
    assert not engine.manager.clients[0].knows(KEYS[40])
    engine.load(B, *KEYS[1:4])
    engine.at_rest()


def test_a_tier_that_fails_to_bring_a_chunk_is_followed_by_the_next(make: Make) -> None:
    engine = with_known(make, tiers=2)
    engine.tiers[0].on_load = lambda transfer: CorruptChunkError("flipped")
    assert engine.settle(B, *KEYS[:4]) == ["HIT"] * 4
    assert engine.tiers[1].called() == ["lookup", "load"]
    engine.load(B, *KEYS[:4])
    engine.at_rest()


def test_a_tier_is_not_passed_over_for_a_later_one_that_is_known_to_have_it(make: Make) -> None:
    engine = with_known(make, tiers=2)
    engine.manager.clients[0]._known.clear()
    assert engine.settle(B, *KEYS[:4]) == ["HIT"] * 4
    assert engine.tiers[0].called() == ["lookup", "load"]
    assert engine.tiers[1].called() == ["lookup"]


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_tier_that_is_out_or_not_asked_is_not_read(make: Make, is_drained: bool) -> None:
    engine = with_known(make)
    choosy = RequestContext("choosy")
    engine.manager.on_new_request(choosy, None if is_drained else [])
    engine.manager.clients[0].is_drained = is_drained
    assert engine.settle(choosy, *KEYS[:4]) == ["MISS"] * 4
    assert engine.tiers[0].calls == []


def test_behind_a_load_that_hangs_a_tier_is_asked_first(make: Make) -> None:
    engine = with_known(make, load_deadline="2s", max_lookup_deadline="50ms")
    tier = engine.tiers[0]
    tier.gate, tier.gated = asyncio.Event(), {"lookup", "load"}
    engine.look(B, KEYS[0])
    engine.step(0.1)
    assert engine.look(A, KEYS[1]) == ["RETRY"]
    engine.step(0.06)
    assert engine.look(A, KEYS[1]) == ["MISS"]
    assert tier.called() == ["load", "lookup"]
    assert misses(engine) == {"timeout": 1}
    # After a failed load, the tier gets a lookup before the next load.
    engine.steps(2.0)
    engine.look(A, KEYS[2])
    engine.step(0.06)
    assert tier.called()[2:] == ["lookup"]


def test_only_a_reset_of_all_tiers_forgets_what_is_known(make: Make) -> None:
    engine = with_known(make)
    engine.manager.reset_cache()
    assert engine.settle(B, *KEYS[:2]) == ["HIT"] * 2
    engine.manager.reset_cache(ResetScope.ALL)
    engine.step(times=2)
    assert engine.settle(B, *KEYS[:4]) == ["MISS"] * 4
    assert engine.tiers[0].called()[-1] == "lookup"


def test_memory_is_bounded_and_the_newest_stay() -> None:
    known = KnownChunks()
    load = Job(1, Operation.LOAD, [], [], RequestContext("r"), 0.0)
    for start in range(0, 300_000, 1000):
        known.found(load, (index.to_bytes(8, "big") for index in range(start, start + 1000)))
    assert all(index.to_bytes(8, "big") in known for index in range(299_990, 300_000))
    assert known._hashes.itemsize * len(known._hashes) == 2**20
    known.discard([(299_999).to_bytes(8, "big")])
    assert (299_999).to_bytes(8, "big") not in known
    known.clear()
    assert (299_998).to_bytes(8, "big") not in known
