from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.engine import CHUNK_BYTES, KEYS, A, B, Engine, Make, stored_below

from kvtier_sdk import (
    OffloadKey,
    RequestContext,
    TierCapacityError,
    TierError,
    TierUnavailableError,
    Transfer,
)
from kvtier_sdk.runner.breaker import BreakerState, Direction

STEP_S = 0.01


@pytest.fixture
def make_weak(make: Make) -> Iterator[Make]:
    engines: list[Engine] = []

    def build(slots: int = 8, tiers: int = 1, **runner: Any) -> Engine:
        engine = make(slots, tiers, **runner)
        for tier in engine.tiers:
            tier.gated = {"lookup", "store", "load"}
            tier.gate = asyncio.Event()
            tier.gate.set()
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        for tier in engine.tiers:
            assert tier.gate is not None
            tier.gate.set()
        engine.at_rest()


def settle(engine: Engine, key: OffloadKey, request: RequestContext = B) -> tuple[str, float]:
    started_s = engine.clock.now_s()
    while (answer := engine.manager.lookup(key, request).name) in ("RETRY", "HIT_PENDING"):
        engine.step(STEP_S)
    if answer == "HIT":
        engine.load(request, key)
    return answer, engine.clock.now_s() - started_s


def test_one_tier_stalled_for_half_a_minute_and_the_other_serves(make_weak: Make) -> None:
    engine = make_weak(slots=16, tiers=2, store_deadline="2s", load_deadline="1s")
    stored_below(engine, *KEYS[:3])
    stalled, healthy = engine.tiers
    assert stalled.gate is not None
    stalled.gate.clear()
    began_s = engine.clock.now_s()
    longest_pinned_s = 0.0
    pinned_since_s: float | None = None
    for index in range(100):
        fresh = KEYS[10 + index]
        assert engine.store(A, fresh) == 1, "its pins never fill the pool"
        # Both tiers have the chunk; the healthy one serves it within the lookup's deadline.
        answer, waited_s = settle(engine, KEYS[index % 3], A)
        assert answer == "HIT"
        assert waited_s < 0.5
        engine.steps(0.3)
        assert fresh in healthy._objects
        pinned = engine.manager.usage().pinned
        now_s = engine.clock.now_s()
        pinned_since_s = (pinned_since_s or now_s) if pinned else None
        longest_pinned_s = max(longest_pinned_s, now_s - (pinned_since_s or now_s))
    assert engine.clock.now_s() - began_s >= 30.0
    assert longest_pinned_s < 2 * 2.0 + 1.0, "stores that began just before the breaker opened"
    assert engine.manager.stats[1].dropped["store.unavailable"] > 50
    assert engine.moves[1] == []
    stalled.gate.set()
    engine.steps(31.0)
    assert {state for _, _, state in engine.moves[0][-1:]} == {BreakerState.CLOSED}
    assert engine.store(A, KEYS[150])
    engine.steps(0.1)
    assert KEYS[150] in stalled._objects


def test_the_end_of_an_outage_tells_how_many_lookups_it_has_cost(
    make_weak: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_weak(retries=0)
    engine.tiers[0].down = TierUnavailableError("connection refused")
    assert [settle(engine, key)[0] for key in KEYS[:8]] == ["MISS"] * 8
    engine.tiers[0].down = None
    engine.steps(2.0)
    assert engine.moves[0][-1][1:] == (Direction.READ, BreakerState.CLOSED)
    # The breaker opened after the fifth failed lookup.
    assert "tier0: meanwhile 3 chunks were not looked up in it" in caplog.text


def test_a_full_disk_stops_stores(make_weak: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_weak(slots=8)
    stored_below(engine, *KEYS[:4])
    tier = engine.tiers[0]
    tier.on_store = lambda transfer: TierCapacityError("no space left")
    for index in range(20):
        engine.store(A, KEYS[20 + index])
        engine.steps(0.02)
    assert [(direction, state) for _, direction, state in engine.moves[0]] == [
        (Direction.WRITE, BreakerState.OPEN)
    ]
    stats = engine.manager.stats[1]
    assert (stats.failures["store.capacity"], stats.dropped["store.unavailable"]) == (5, 15)
    for key in KEYS[:4]:
        assert settle(engine, key)[0] == "HIT"
    assert engine.manager.stats[1].hit_chunks == 4
    tier.on_store = lambda transfer: None
    engine.steps(1.1)
    assert engine.moves[0][-1][1:] == (Direction.WRITE, BreakerState.CLOSED)
    assert engine.store(A, KEYS[60])
    engine.steps(0.05)
    assert KEYS[60] in tier._objects
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(",")[0] for line in told[-2:]] == [
        "tier0: writes are taken again",
        "tier0: meanwhile 15 chunks were not stored in it",
    ]
    # The probe deletes its own chunk, which is not an eviction.
    assert engine.manager.stats[1].evicted_chunks == 0


def test_a_blocked_loop_is_logged_once(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    for key in KEYS[:50]:
        engine.manager.lookup(key, A)
        engine.manager.on_schedule_end()
    # Nothing runs the tier's loop until long after the lookups' deadline.
    engine.clock.advance(5.0)
    assert engine.look(A, *KEYS[:50]) == ["MISS"] * 50
    assert engine.manager.stats[1].failures == {"lookup.timeout": 50}
    said = [record for record in caplog.records if "blocks its loop" in record.getMessage()]
    assert len(said) == 1
    engine.at_rest()


def test_a_tier_whose_stores_hang_is_slow_within_seconds_and_gets_no_more(
    make_weak: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_weak(slots=16)
    engine.store(A, *KEYS[:2])
    engine.steps(0.05)
    tier, stats = engine.tiers[0], engine.manager.stats[1]
    tier.gated = {"store"}
    assert tier.gate is not None
    tier.gate.clear()
    engine.store(A, KEYS[40])
    engine.steps(1.9)
    assert slowness(engine) == 0
    # Without a step of the engine, a scrape still notices that the tier is slow.
    engine.runners[0].run_for(0.2)
    assert (slowness(engine), stats.is_slow) == (1, 0)
    engine.steps(0.3)
    engine.store(A, KEYS[41], KEYS[42])
    assert (stats.dropped["store.slow"], engine.manager.usage().pinned) == (2, 1)
    engine.steps(2.0)
    assert "no load or store has made progress for 2 s" in caplog.text
    tier.gate.set()
    engine.runners[0].run_for(0.0)
    assert (slowness(engine), stats.is_slow) == (0, 1)
    engine.steps(0.01)
    told = caplog.messages
    assert told[-2:] == ["tier0: no longer slow", "tier0: meanwhile 2 chunks were not stored in it"]
    engine.store(A, KEYS[43])
    engine.steps(0.01)
    assert KEYS[43] in tier._objects


def slowness(engine: Engine) -> float | object:
    samples = engine.manager.samples()
    return next(s.value for s in samples if s.metric.name == "kvtier_tier_slow")


def test_a_store_of_many_calls_that_goes_on_is_not_slow(make_weak: Make) -> None:
    engine = make_weak(slots=16, max_batch=CHUNK_BYTES, concurrency=1)
    stored_below(engine, KEYS[9])
    tier = engine.tiers[0]
    tier.gated = {"store"}
    assert tier.gate is not None
    tier.gate.clear()
    engine.store(A, *KEYS[:8])
    for _ in range(6):
        engine.steps(1.5)
        assert slowness(engine) == 0
        tier.gate.set()
        engine.runners[0].run_for(0.0)
        tier.gate.clear()
    assert set(KEYS[:2]) <= set(tier._objects)


def test_what_waits_for_a_tier_is_bounded_by_what_it_moves_in_two_seconds(make: Make) -> None:
    engine = make(slots=100, max_batch=CHUNK_BYTES, concurrency=1)
    tier, client = engine.tiers[0], engine.manager.clients[0]
    assert client.store_room == 1, "what it is given at once, as long as nothing is known"
    pace_s = 0.5

    async def slow_store(batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        await engine.clock.sleep(pace_s)
        return [None] * len(batch)

    tier.store = slow_store  # type: ignore[method-assign]
    engine.store(A, *KEYS[:20])
    engine.steps(11.0)
    assert client.store_room == 4
    engine.store(A, *KEYS[20:30])
    assert (engine.manager.usage().pinned, engine.manager.stats[1].dropped) == (
        4,
        {"store.queue_full": 19 + 6},
    )
    engine.steps(3.0)
    # Make the tier faster, so its queue of stores may grow longer.
    pace_s = 0.01
    for start in (100, 110, 120):
        engine.store(A, *KEYS[start : start + 10])
        engine.steps(1.0)
    assert client.store_room == 50


def test_a_runner_that_is_closed_leaves_the_end_of_an_outage_to_the_client() -> None:
    (runner,) = Engine().runners
    assert runner.log_end("slow", "tier0: no longer slow")
    runner.close(1.0)
    assert not runner.log_end("slow", "tier0: no longer slow")
