from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from support.core import pure_core_only
from support.engine import KEYS, A, B, Engine, Make, start_promotion, stored_below

from kvtier_sdk.engine import ResetScope, TierClient


def drain(engine: Engine, tier: int = 0, *, drained: bool = True) -> None:
    engine.manager.clients[tier].is_drained = drained


def drained(make: Make) -> Engine:
    engine = make()
    stored_below(engine, KEYS[0])
    drain(engine)
    return engine


def counted(counter: Mapping[str, int]) -> dict[str, int]:
    return {what: count for what, count in counter.items() if count}


def test_a_drained_tier_gets_nothing_and_counts_as_absent(make: Make) -> None:
    engine = drained(make)
    calls = len(engine.tiers[0].calls)
    assert engine.look(B, KEYS[0]) == ["MISS"], "at once"
    assert engine.store(A, KEYS[1]) == 1
    engine.steps(0.1)
    assert len(engine.tiers[0].calls) == calls
    host, tier = engine.manager.stats
    assert counted(host.misses) == {"absent": 1}
    assert counted(tier.dropped) == {"store.drained": 1}
    engine.at_rest()


def test_a_tier_that_is_put_back_serves_what_it_has_and_gets_what_it_missed(make: Make) -> None:
    engine = drained(make)
    assert engine.store(A, KEYS[1])
    engine.step()
    drain(engine, drained=False)
    assert engine.settle(A, KEYS[0]) == ["HIT"]
    engine.load(A, KEYS[0])
    # The tier was drained when this chunk came. A request that uses the chunk offers it again.
    assert engine.settle(A, KEYS[1]) == ["HIT"]
    engine.load(A, KEYS[1])
    engine.steps(0.1)
    assert KEYS[1] in engine.tiers[0]._objects
    engine.at_rest()


def test_what_is_under_way_ends_and_only_then_the_tier_is_idle(make: Make) -> None:
    engine = make()
    tier, client = engine.tiers[0], engine.manager.clients[0]
    start_promotion(engine, KEYS[0])
    tier.gate = asyncio.Event()
    engine.step()
    assert engine.store(A, KEYS[1])
    engine.step()
    drain(engine)
    engine.steps(0.1)
    assert (client.takes_reads, client.takes_stores, client.is_idle) == (False, False, False)
    tier.gate.set()
    engine.steps(0.1)
    assert client.is_idle
    assert engine.look(B, KEYS[0]) == ["HIT"]
    engine.load(B, KEYS[0])
    assert KEYS[1] in tier._objects
    engine.at_rest()


@pytest.mark.parametrize("step", ["asked", "answered", "loading"])
def test_a_request_in_the_middle_of_its_lookup_is_not_stuck(make: Make, step: str) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    assert engine.look(B, KEYS[0]) == ["RETRY"]
    if step != "asked":
        engine.step()
    if step == "loading":
        assert engine.look(B, KEYS[0]) == ["HIT_PENDING"]
    drain(engine)
    answer = engine.settle(B, KEYS[0])
    assert answer == (["HIT"] if step == "loading" else ["MISS"])
    if step == "loading":
        engine.load(B, KEYS[0])
    engine.at_rest()


def test_chunks_that_are_owed_to_a_drained_tier_do_not_fill_the_pool(make: Make) -> None:
    engine = make(slots=8, store_policy="on_evict")
    for key in KEYS[:8]:
        engine.store(A, key)
        engine.step()
    drain(engine)
    for key in KEYS[8:24]:
        engine.step()
        assert engine.store(A, key) == 1
    assert list(counted(engine.manager.stats[1].dropped)) == ["store.drained"]
    engine.at_rest()


def test_a_purge_waits_until_the_tier_is_back(make: Make) -> None:
    engine = drained(make)
    engine.manager.reset_cache(ResetScope.ALL)
    engine.manager.on_reset_flushed()
    engine.steps(1.0)
    assert KEYS[0] in engine.tiers[0]._objects
    drain(engine, drained=False)
    assert engine.look(B, KEYS[0]) == ["MISS"], "not before it was emptied"
    engine.steps(1.0)
    assert KEYS[0] not in engine.tiers[0]._objects
    engine.at_rest()


@pure_core_only
def test_a_load_that_was_decided_on_begins_even_if_the_tier_goes_that_moment(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    stored_below(engine, KEYS[0])
    assert engine.look(B, KEYS[0]) == ["RETRY"]
    engine.step()
    room = vars(TierClient)["load_room"]

    def drain_behind_the_engines_back(client: TierClient) -> int:
        client.is_drained = True
        return int(room.fget(client))

    monkeypatch.setattr(TierClient, "load_room", property(drain_behind_the_engines_back))
    assert engine.look(B, KEYS[0]) == ["HIT_PENDING"]
    monkeypatch.undo()
    assert engine.settle(B, KEYS[0]) == ["HIT"], "its slot does not wait for ever"
    engine.load(B, KEYS[0])
    engine.at_rest()
