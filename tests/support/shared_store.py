"""Engines that share a store and a virtual clock, each with a publisher."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

from kvtier_sdk import (
    HostPool,
    Medium,
    Namespace,
    OffloadKey,
    RequestContext,
    TierSpec,
    event_publisher,
)
from kvtier_sdk.events import ChunkNote
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.runner.loop import TierLoop
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.testing.virtual_clock import VirtualClock
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.tiers.memory import MemoryTier, MemoryTierConfig
from kvtier_sdk.types import make_offload_key, split_offload_key
from support.inline_runner import InlineRunner
from support.router import Router, free_endpoints, publisher_at

CHUNK_BYTES = 2048
INTERVAL_S = 60.0
#: A shorter interval than real publishers have, because the tests wait for heartbeats.
_HEARTBEAT_S = 0.1
REQUEST = RequestContext("r")


class SharedTier(MemoryTier):
    """A memory tier whose instances share one store; each reports only its own removals."""

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
    """Return a chunk's key and its note of two blocks. Lines 2n and 2n+1 share the first block."""

    def block(line: int, at: int) -> int:
        return random.Random(f"{line} {at}").getrandbits(64)

    first, last = block(line // 2, 2 * place), block(line, 2 * place + 1)
    parent = block(line, 2 * place - 1) if place else None
    key = make_offload_key(random.Random(f"{line} {place} key").randbytes(32))
    return key, ChunkNote([first, last], parent, list(range(8)), 4).encode()


class Engine:
    """A tier's client with a publisher, in a simulated process that a test can restart."""

    def __init__(self, clock: VirtualClock, pool: HostPool, seed: int, **options: Any) -> None:
        self._clock, self._pool, self._options = clock, pool, options
        self._rng = random.Random(seed)
        self.notes: dict[OffloadKey, bytes] = {}
        self._endpoints = free_endpoints()
        self._start()
        self.router = Router(*self._endpoints, loss=0.2, seed=seed)

    def _start(self) -> None:
        self.publisher = publisher_at(self._endpoints, "kv")
        self._open()

    def _open(self) -> None:
        runner = RunnerOptions.model_validate({"scan_interval": INTERVAL_S})
        config = MemoryTierConfig.model_validate(self._options)
        spec = TierSpec("shared", "memory", SharedTier, config, runner, inventory="tokens")

        def make_loop(report: Any) -> TierLoop:
            return TierLoop(
                spec,
                namespace=Namespace({}),
                memory=self._pool,
                clock=self._clock,
                report=report,
                announce=self.publisher.put,
                rng=self._rng,
            )

        self.runner = InlineRunner(make_loop, self._clock)
        self.client = TierClient(
            spec,
            self.runner,
            TierListener(),
            clock=self._clock,
            chunk_bytes=CHUNK_BYTES,
            note_of=lambda key: self.notes.get(key, b""),
        )
        self.client.open()

    def run(self, duration_s: float, *, is_idle: bool = False) -> None:
        self.client.flush()
        self.runner.run_for(duration_s)
        if not is_idle:
            self.client.poll()

    def scan_twice(self) -> None:
        """Run until two whole scans have followed the current scan."""
        inventory = self.runner._tier_loop._inventory
        # Count scans instead of time: this engine scans late if other engines advance the clock.
        wanted = inventory._scan_number + 3
        while inventory._scan_number < wanted:
            self.run(INTERVAL_S)

    def tell_everything(self) -> None:
        """Wait until the router has received all events of this engine."""
        while self.publisher._events:
            self.router.catch_up(_HEARTBEAT_S)
        # The publisher's thread may still be sending its last events; a heartbeat follows them.
        heartbeat = self.publisher._next + 2
        while self.router._expected < heartbeat:
            self.router.catch_up(_HEARTBEAT_S)

    def restart(self, *, in_time: bool, at_rest: bool = True) -> None:
        """Close the client if ``in_time``, otherwise crash. Restart; only the store survives."""
        if in_time:
            self.client.close()
        else:
            # Scan first, because a crash loses all notes since the last scan, and chunks without
            # notes would stay unknown.
            self.scan_twice() if at_rest else self.run(0.0)
            end_event_loop(self.runner._event_loop, self._clock)
        self.publisher.close()
        self.notes.clear()
        self._clock.advance(1.0)
        self._start()

    def lose_tier(self) -> None:
        self.scan_twice()
        end_event_loop(self.runner._event_loop, self._clock)
        self._clock.advance(1.0)
        self._open()

    def close(self) -> None:
        self.router.close()
        self.publisher.close()
        self.client.close()


@contextmanager
def engines_on_one_store(count: int, **options: Any) -> Iterator[list[Engine]]:
    SharedTier.shared = None
    clock = VirtualClock()
    pool = HostPool(8, CHUNK_BYTES)
    with patch.multiple(event_publisher, _MOST_KEPT=8, _HEARTBEAT_S=_HEARTBEAT_S):
        made = [Engine(clock, pool, seed, **options) for seed in range(count)]
        yield made
        for engine in made:
            engine.close()
    pool.close()


def stored_keys(*, segments: bool = False) -> set[OffloadKey]:
    """Return the keys of the store's chunks, or of its segments of notes."""
    return {key for key in SharedTier.shared[0] if bool(split_offload_key(key)[1]) is segments}


def lose(keys: Sequence[OffloadKey]) -> None:
    """Remove chunks without a report, as another process would."""
    for key in keys:
        if key in SharedTier.shared[0]:
            for table in SharedTier.shared:
                del table[key]
