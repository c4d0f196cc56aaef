"""Tiers that fail in the background: what the manager's callers see. Virtual clock, real bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier_sdk import (
    HostPool,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    OffloadKey,
    RequestContext,
    RunnerOptions,
    TierCapacityError,
    TierError,
    TieringManager,
    TierSpec,
    TierUnavailableError,
    Transfer,
    load_policy,
    make_offload_key,
)
from kvtier_sdk.breaker import BreakerState, Direction
from kvtier_sdk.jobs import BreakerMoved, Report
from kvtier_sdk.runner import TierLoop
from kvtier_sdk.testing import InlineRunner, VirtualClock

CHUNK_BYTES = 64
KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(2000)]
A, B = RequestContext("a"), RequestContext("b")
STEP_S = 0.01


class WeakTier(MemoryTier):
    """A memory tier that is well until it is told otherwise."""

    def __init__(self, config: MemoryTierConfig, context: Any) -> None:
        super().__init__(config, context)
        self.well = asyncio.Event()
        self.well.set()
        self.down: TierError | None = None
        self.full = False
        self.calls: list[str] = []

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        await self._fare("lookup")
        return await super().lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        await self._fare("store")
        if self.full:
            return [TierCapacityError("no space left") for _ in batch]
        return await super().store(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        await self._fare("load")
        return await super().load(batch)

    async def _fare(self, operation: str) -> None:
        self.calls.append(operation)
        await self.well.wait()
        if self.down is not None:
            raise self.down


class Engine:
    """A manager over weak tiers; each step of the engine takes ten milliseconds."""

    def __init__(self, slots: int, tiers: int, **runner: Any) -> None:
        self.clock = VirtualClock()
        self.pool = HostPool(slots, CHUNK_BYTES)
        self.manager = TieringManager(self.pool, policy=load_policy("lru")(), clock=self.clock)
        self.tiers: list[WeakTier] = []
        self.runners: list[InlineRunner] = []
        self.moves: list[list[tuple[float, Direction, BreakerState]]] = []
        for index in range(tiers):
            self._add(f"tier{index}", runner)
        for request in (A, B):
            self.manager.on_new_request(request)

    def _add(self, name: str, options: dict[str, Any]) -> None:
        spec = TierSpec(
            name, "memory", WeakTier, MemoryTierConfig(), RunnerOptions.model_validate(options)
        )
        moves: list[tuple[float, Direction, BreakerState]] = []
        loops: list[TierLoop] = []

        def make_loop(report: Callable[[Report], None]) -> TierLoop:
            def watch(report_: Report) -> None:
                if isinstance(report_, BreakerMoved):
                    moves.append((self.clock.now_s(), report_.direction, report_.state))
                report(report_)

            loops.append(
                TierLoop(
                    spec,
                    namespace=Namespace({}),
                    memory=self.pool,
                    clock=self.clock,
                    report=watch,
                )
            )
            return loops[0]

        self.runners.append(InlineRunner(make_loop, self.clock))
        self.manager.add_tier(spec, self.runners[-1])
        tier = loops[0]._tier
        assert isinstance(tier, WeakTier)
        self.tiers.append(tier)
        self.moves.append(moves)

    def step(self, duration_s: float = STEP_S) -> None:
        """End a step, and let the tiers run."""
        self.manager.on_schedule_end()
        started_s = self.clock.now_s()
        for runner in self.runners:
            # One clock serves all: each runs to the same moment.
            runner.run_for(max(0.0, started_s + duration_s - self.clock.now_s()))
            runner.run_for(0.0)

    def steps(self, duration_s: float) -> None:
        until_s = self.clock.now_s() + duration_s
        while self.clock.now_s() < until_s:
            self.step()

    def store(self, *keys: OffloadKey) -> int:
        """Store chunks for A; how many got a slot."""
        output = self.manager.prepare_store(keys, A)
        for key, slot in zip(output.keys_to_store, output.slots, strict=True):
            self.pool.view(slot, "test")[:] = (key * CHUNK_BYTES)[:CHUNK_BYTES]
        self.manager.complete_store(output.keys_to_store, A)
        return len(output.keys_to_store)

    def settle(self, key: OffloadKey, *, request: RequestContext = B) -> tuple[str, float]:
        """Look up until nothing is pending: the answer, and after how long."""
        started_s = self.clock.now_s()
        while (answer := self.manager.lookup(key, request).name) in ("RETRY", "HIT_PENDING"):
            self.step()
        if answer == "HIT":
            (slot,) = self.manager.prepare_load([key], request).slots
            assert self.pool.view(slot, "test") == (key * CHUNK_BYTES)[:CHUNK_BYTES]
            self.manager.complete_load([key], request)
        return answer, self.clock.now_s() - started_s

    def stored_below(self, *keys: OffloadKey) -> None:
        """Store chunks, and push them out of the primary tier."""
        for key in keys:
            assert self.store(key)
            self.steps(0.05)
        for key in KEYS[-self.pool.slots :]:
            assert self.store(key)
            self.steps(0.05)

    def close(self) -> None:
        for tier in self.tiers:
            tier.well.set()
        self.steps(1.0)
        usage = self.manager.usage()
        assert (usage.pinned, usage.loading, usage.quarantined) == (0, 0, 0)
        self.manager.shutdown(1.0)
        self.pool.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def build(slots: int = 8, tiers: int = 1, **runner: Any) -> Engine:
        engines.append(Engine(slots, tiers, **runner))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


Make = Callable[..., Engine]


def test_one_tier_stalled_for_half_a_minute_and_the_other_serves(make: Make) -> None:
    engine = make(slots=16, tiers=2, store_deadline="2s", load_deadline="1s")
    engine.stored_below(*KEYS[:3])
    stalled, healthy = engine.tiers
    stalled.well.clear()
    began_s = engine.clock.now_s()
    longest_pinned_s = 0.0
    pinned_since_s: float | None = None
    for index in range(100):
        fresh = KEYS[10 + index]
        assert engine.store(fresh) == 1, "its pins never fill the pool"
        # What both have comes from the one that answers, and no later than a lookup may take.
        answer, waited_s = engine.settle(KEYS[index % 3], request=A)
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
    stalled.well.set()
    engine.steps(31.0)
    assert {state for _, _, state in engine.moves[0][-1:]} == {BreakerState.CLOSED}
    # It is a tier like before.
    assert engine.store(KEYS[150])
    engine.steps(0.1)
    assert KEYS[150] in stalled._objects


@pytest.mark.parametrize("with_traffic", [True, False])
def test_ten_seconds_down_then_up_again_without_traffic(make: Make, with_traffic: bool) -> None:
    engine = make(retries=0)
    engine.stored_below(KEYS[0])
    tier = engine.tiers[0]
    tier.down = TierUnavailableError("connection refused")
    down_s = engine.clock.now_s()
    index = 100
    while engine.clock.now_s() < down_s + 10.0:
        if with_traffic or not engine.moves[0]:
            # Through the breaker or not, an answer takes no longer than a lookup may.
            answer, waited_s = engine.settle(KEYS[index])
            assert (answer, waited_s <= 0.06) == ("MISS", True)
            index += 1
        engine.step()
    opened_s, direction, state = engine.moves[0][0]
    assert (direction, state) == (Direction.READ, BreakerState.OPEN)
    assert opened_s - down_s < 0.5
    calls = len(tier.calls)
    # Five calls that failed, and one a probe.
    assert calls - tier.calls.index("lookup") < 20
    tier.down = None
    up_s = engine.clock.now_s()
    probed_s = [at_s for at_s, _, state in engine.moves[0] if state is BreakerState.HALF_OPEN]
    pause_s = 2 * (probed_s[-1] - probed_s[-2])
    engine.step(pause_s)
    closed_s, _, state = engine.moves[0][-1]
    assert state is BreakerState.CLOSED
    assert closed_s - up_s <= pause_s
    assert tier.calls[calls:] == ["lookup", "load"], "the probe's, and nobody else's"
    assert engine.settle(KEYS[0], request=A)[0] == "HIT"


def test_while_it_is_open_a_lookup_is_a_miss_at_once_and_counted_apart(make: Make) -> None:
    engine = make(retries=0)
    engine.stored_below(KEYS[0])
    engine.tiers[0].down = TierUnavailableError("connection refused")
    for index in range(5):
        engine.settle(KEYS[100 + index])
    calls = len(engine.tiers[0].calls)
    misses = engine.manager.stats[0].misses
    before = misses["unavailable"]
    assert engine.settle(KEYS[0]) == ("MISS", 0.0)
    assert misses["unavailable"] == before + 1
    assert "absent" not in misses
    assert engine.manager.stats[1].reads_open == 1
    assert len(engine.tiers[0].calls) == calls


def test_a_full_disk_stops_stores_and_not_loads(make: Make) -> None:
    engine = make(slots=8)
    engine.stored_below(*KEYS[:4])
    tier = engine.tiers[0]
    tier.full = True
    for index in range(20):
        engine.store(KEYS[20 + index])
        engine.steps(0.02)
    assert [(direction, state) for _, direction, state in engine.moves[0]] == [
        (Direction.WRITE, BreakerState.OPEN)
    ]
    stats = engine.manager.stats[1]
    assert (stats.failures["store.capacity"], stats.dropped["store.unavailable"]) == (5, 15)
    for key in KEYS[:4]:
        assert engine.settle(key)[0] == "HIT"
    assert engine.manager.stats[1].hit_chunks == 4
    tier.full = False
    engine.steps(1.1)
    assert engine.moves[0][-1][1:] == (Direction.WRITE, BreakerState.CLOSED)
    assert engine.store(KEYS[60])
    engine.steps(0.05)
    assert KEYS[60] in tier._objects
    # The canary came and went unseen.
    assert engine.manager.stats[1].evicted_chunks == 0
