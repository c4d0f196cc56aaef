"""Routers know exactly what is in a shared store, whatever engines, others and the network do.

``KVTIER_INVENTORY_EVENTS=1000000`` plays so many changes; by default a few thousand.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from typing import Any, ClassVar

import pytest
from support.router import Router

from kvtier_sdk import HostPool, Medium, Namespace, OffloadKey, RequestContext, TierSpec
from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.event_publisher import EventPublisher
from kvtier_sdk.events import ChunkNote, read_note
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.testing.inline_runner import InlineRunner
from kvtier_sdk.testing.virtual_clock import VirtualClock
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.tiers.memory import MemoryTier, MemoryTierConfig
from kvtier_sdk.types import make_offload_key, split_offload_key

EVENTS = int(os.environ.get("KVTIER_INVENTORY_EVENTS", "4000"))
CHUNK_BYTES = 2048
INTERVAL_S = 60.0
REQUEST = RequestContext("r")


class SharedTier(MemoryTier):
    """A memory tier whose instances share one store; each reports only what it removes itself."""

    medium = Medium.STORAGE
    shared: ClassVar[Any] = None

    async def open(self) -> None:
        cls = type(self)
        if cls.shared is None:
            cls.shared = self._objects, self._used_s, self._stored_s
        self._objects, self._used_s, self._stored_s = cls.shared

    @property
    def _used_bytes(self) -> int:
        return sum(map(len, self._objects.values()))

    @_used_bytes.setter
    def _used_bytes(self, used: int) -> None:
        pass


def chunk(line: int, place: int) -> tuple[OffloadKey, bytes]:
    """Return a prompt's chunk of two blocks, of which two prompts share the first."""

    def block(line: int, at: int) -> int:
        return random.Random(f"{line} {at}").getrandbits(64)

    first, last = block(line // 2, 2 * place), block(line, 2 * place + 1)
    parent = block(line, 2 * place - 1) if place else None
    key = make_offload_key(random.Random(f"{line} {place} key").randbytes(32))
    return key, ChunkNote([first, last], parent, list(range(8)), 4).encode()


class Engine:
    """A tier's client with a publisher, in a process that can end at any time."""

    def __init__(self, clock: VirtualClock, pool: HostPool, seed: int) -> None:
        self._clock, self._pool = clock, pool
        self._rng = random.Random(seed)
        self.notes: dict[OffloadKey, bytes] = {}
        self._endpoints = [
            f"tcp://127.0.0.1:{5600 + os.getpid() % 500 * 8 + seed * 2 + i}" for i in (0, 1)
        ]
        self._start()
        self.router = Router(*self._endpoints, loss=0.2, seed=seed)

    def _start(self) -> None:
        self.publisher = EventPublisher(
            *self._endpoints, topic="kv", tokens=True, rank=0, clock=SystemClock(), kept_batches=8
        )
        self._open()

    def _open(self) -> None:
        options = RunnerOptions.model_validate({"scan_interval": INTERVAL_S})
        spec = TierSpec(
            "shared", "memory", SharedTier, MemoryTierConfig(), options, inventory="tokens"
        )

        def make_loop(report: Any) -> TierLoop:
            return TierLoop(
                spec,
                namespace=Namespace({}),
                memory=self._pool,
                clock=self._clock,
                report=report,
                rng=self._rng,
            )

        self.runner = InlineRunner(make_loop, self._clock)
        self.client = TierClient(
            spec,
            self.runner,
            TierListener(),
            clock=self._clock,
            chunk_bytes=CHUNK_BYTES,
            announce=self.publisher.put,
            note_of=lambda key: self.notes.get(key, b""),
        )
        self.client.open()

    def run(self, duration_s: float, *, is_idle: bool = False) -> None:
        self.client.flush()
        self.runner.run_for(duration_s)
        if is_idle:
            self.client.announce()
        else:
            self.client.poll()

    def restart(self, *, in_time: bool) -> None:
        """End the process, with or without its last words; only the store is left of it."""
        if in_time:
            self.client.close()
        else:
            # A crash loses the notes since the last scan, and only they make a chunk unknown.
            self.run(2 * INTERVAL_S)
            end_event_loop(self.runner._event_loop, self._clock)
        self.publisher.close()
        self.notes.clear()
        self._clock.advance(1.0)
        self._start()

    def lose_tier(self) -> None:
        """End the tier's process alone."""
        self.run(2 * INTERVAL_S)
        end_event_loop(self.runner._event_loop, self._clock)
        self._clock.advance(1.0)
        self._open()

    def close(self) -> None:
        self.router.close()
        self.publisher.close()
        self.client.close()


@pytest.fixture
def engines() -> Any:
    SharedTier.shared = None
    clock = VirtualClock()
    pool = HostPool(8, CHUNK_BYTES)
    made = [Engine(clock, pool, seed) for seed in (0, 1)]
    yield made
    for engine in made:
        engine.close()
    pool.close()


def told_by(engine: Engine) -> set[int]:
    engine.router.catch_up()
    counts = engine.router.blocks
    assert set(counts.values()) <= {1}, "a router that counts would be wrong"
    return {block for _, _, block in counts}


def test_what_is_announced_is_there(engines: list[Engine]) -> None:
    rng = random.Random(7)
    chunks = dict(chunk(line, place) for line in range(24) for place in range(6))
    keys = list(chunks)
    done: Counter[str] = Counter()

    def really() -> set[int]:
        there = [key for key in SharedTier.shared[0] if split_offload_key(key)[1] == 0]
        notes = [read_note(key, chunks[key]) for key in there]
        return {block for note in notes for block in note.block_hashes}

    def step() -> None:
        engine = rng.choice(engines)
        some = rng.sample(keys, rng.randint(1, 8))
        what = rng.choices(
            ["store", "delete", "evict", "lookup", "time", "idle", "loss of tier", "restart"],
            [300, 60, 60, 60, 20, 20, 1, 1],
        )[0]
        done[what] += len(some)
        objects = SharedTier.shared[0]
        if what == "store":
            engine.notes.update({key: chunks[key] for key in some})
            engine.client.store(some, range(len(some)), REQUEST)
        elif what == "delete":
            engine.client.delete(some)
        elif what == "lookup":
            engine.client.lookup(some, REQUEST)
        elif what == "evict":
            # Another process removes them, which no engine hears.
            for key in some:
                if key in objects:
                    for table in SharedTier.shared:
                        del table[key]
        elif what == "loss of tier":
            engine.lose_tier()
        elif what == "restart":
            engine.restart(in_time=rng.random() < 0.5)
        engine.run(40.0 if what == "time" else 0.001, is_idle=what == "idle")
        engine.router.listen(0.001)

    def settle() -> None:
        for _ in range(2):
            for engine in engines:
                engine.run(10 * INTERVAL_S)

    checked = 0
    while sum(done.values()) < EVENTS:
        step()
        if sum(done.values()) >= checked + EVENTS / 4:
            checked = sum(done.values())
            settle()
            there = really()
            for engine in engines:
                assert told_by(engine) == there
    assert len(there) > 20
    assert all(engine.router.snapshots for engine in engines)
    assert min(done.values()) > 0
