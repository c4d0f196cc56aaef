"""A manager over faulty tiers, stepped by hand on a virtual clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from kvtier_sdk import (
    Entry,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    OffloadKey,
    RequestContext,
    RunnerOptions,
    TierError,
    TierSpec,
    Transfer,
    load_policy,
    make_offload_key,
)
from kvtier_sdk.engine import PrepareStoreOutput
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner import TierLoop
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import BreakerMoved, Report
from kvtier_sdk.testing import VirtualClock
from kvtier_sdk.tiering.manager import TieringManager
from support.inline_runner import InlineRunner
from support.live import Live, content

CHUNK_BYTES = 64
KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(2000)]
A, B = RequestContext("a"), RequestContext("b")


class FaultyTier(MemoryTier):
    def __init__(self, config: MemoryTierConfig, context: Any) -> None:
        super().__init__(config, context)
        self.on_load: Callable[[Transfer], TierError | None] = lambda transfer: None
        self.on_store: Callable[[Transfer], TierError | None] = lambda transfer: None
        # The operations in ``gated`` wait for this event.
        self.gate: asyncio.Event | None = None
        self.gated = {"store", "load"}
        self.stubborn = False
        self.raises: Exception | None = None  # raised by the next load or store
        self.down: TierError | None = None  # raised by each lookup, load and store while set
        self.scan_error: TierError | None = None
        self.calls: list[tuple[str, list[OffloadKey]]] = []

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        self.calls.append(("lookup", list(keys)))
        await self._pass("lookup")
        return await super().lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self.calls.append(("store", [transfer.key for transfer in batch]))
        await self._trouble("store")
        verdicts = [self.on_store(transfer) for transfer in batch]
        good = [t for t, error in zip(batch, verdicts, strict=True) if error is None]
        await super().store(good)
        return verdicts

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self.calls.append(("load", [transfer.key for transfer in batch]))
        await self._trouble("load")
        verdicts = [self.on_load(transfer) for transfer in batch]
        loaded = await super().load(batch)
        return [ours or theirs for ours, theirs in zip(verdicts, loaded, strict=True)]

    async def scan(self) -> AsyncIterator[Entry]:
        if self.scan_error is not None:
            raise self.scan_error
        async for entry in super().scan():
            yield entry

    def called(self) -> list[str]:
        return [operation for operation, _ in self.calls]

    async def _trouble(self, operation: str) -> None:
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise error
        await self._pass(operation)

    async def _pass(self, operation: str) -> None:
        while operation in self.gated and self.gate is not None and not self.gate.is_set():
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
        if self.down is not None:
            raise self.down


class Engine(Live):
    def __init__(
        self,
        slots: int = 8,
        tiers: int = 1,
        manager: dict[str, Any] | None = None,
        each: Sequence[dict[str, Any]] = (),
        **runner: Any,
    ) -> None:
        self.clock = VirtualClock()
        pool = HostPool(slots, CHUNK_BYTES)
        options = {"events": True, **(manager or {})}
        made = TieringManager(pool, policy=load_policy("lru")(), clock=self.clock, **options)
        super().__init__(made, pool, threading.Event())
        self.runners: list[InlineRunner] = []
        self.tiers: list[FaultyTier] = []
        # For each tier, the time, direction and new state of each breaker change.
        self.moves: list[list[tuple[float, Direction, BreakerState]]] = []
        for index in range(tiers):
            self.add(f"tier{index}", {**runner, **(each[index] if each else {})})

    def add(self, name: str, runner: dict[str, Any]) -> None:
        spec = TierSpec(
            name, "memory", FaultyTier, MemoryTierConfig(), RunnerOptions.model_validate(runner)
        )
        loops: list[TierLoop] = []
        moves: list[tuple[float, Direction, BreakerState]] = []

        def make_loop(report: Callable[[Report], None]) -> TierLoop:
            def watch(seen: Report) -> None:
                if isinstance(seen, BreakerMoved):
                    moves.append((self.clock.now_s(), seen.direction, seen.state))
                report(seen)

            loops.append(
                TierLoop(
                    spec, namespace=Namespace({}), memory=self.pool, clock=self.clock, report=watch
                )
            )
            return loops[0]

        self.runners.append(InlineRunner(make_loop, self.clock))
        self.manager.add_tier(spec, self.runners[-1])
        tier = loops[0].call.tier
        assert isinstance(tier, FaultyTier)
        self.tiers.append(tier)
        self.moves.append(moves)

    def step(self, duration_s: float = 0.001, *, times: int = 1) -> None:
        for _ in range(times):
            self.manager.on_schedule_end()
            until_s = self.clock.now_s() + duration_s
            for runner in self.runners:
                # A runner advances the shared clock, so each runs only for the rest of the step.
                runner.run_for(max(0.0, until_s - self.clock.now_s()))
                runner.run_for(0.0)

    def steps(self, duration_s: float, step_s: float = 0.01) -> None:
        until_s = self.clock.now_s() + duration_s
        while self.clock.now_s() < until_s:
            self.step(step_s)

    def store(self, request: RequestContext, *keys: OffloadKey) -> int:
        output = self.manager.prepare_store(keys, request)
        self.write(output)
        self.manager.complete_store(output.keys_to_store, request)
        return len(output.keys_to_store)

    def write(self, output: PrepareStoreOutput) -> None:
        for key, slot in zip(output.keys_to_store, output.slots, strict=True):
            self.pool.view(slot)[:] = content(key, CHUNK_BYTES)

    def look(self, request: RequestContext, *keys: OffloadKey) -> list[str]:
        return [self.manager.lookup(key, request).name for key in keys]

    def push_out(self, request: RequestContext) -> None:
        """Evict all chunks from the primary tier by storing other chunks in all slots."""
        for start in range(32, 32 + self.pool.slots):
            self.store(request, KEYS[start])
            self.step(times=2)

    def at_rest(self) -> None:
        self.at_rest_with(writing=0)
        usage = self.manager.usage()
        assert usage.free + usage.ready == usage.slots

    def at_rest_with(self, *, writing: int) -> None:
        """Assert that no work is pending, and that the device still writes ``writing`` slots."""
        for _ in range(3):
            self.step(1.0)
        usage = self.manager.usage()
        assert not self.manager.has_pending_work()
        assert (usage.pinned, usage.writing, usage.loading, usage.quarantined) == (0, writing, 0, 0)


Make = Callable[..., Engine]


def stored_below(engine: Engine, *keys: OffloadKey) -> None:
    """Leave chunks only in the tiers, unknown to the manager, as after a restart of the engine."""
    for start in range(0, len(keys), 4):
        engine.store(A, *keys[start : start + 4])
        engine.step(times=2)
    engine.push_out(A)
    for client in engine.manager.clients:
        client._known.clear()


def start_promotion(engine: Engine, key: OffloadKey) -> None:
    """Let request ``B`` find a stored chunk; the next step submits the chunk's load."""
    stored_below(engine, key)
    assert engine.look(B, key) == ["RETRY"]
    engine.step()
    assert engine.look(B, key) == ["HIT_PENDING"]
