"""The gate opens if a shorter chunk saves more time on the link than its expansion takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from support.filled import floats

from kvtier_sdk import Operation, RequestContext, TierError, Transfer
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.runner.compression import CompressionGate
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.testing.virtual_clock import VirtualClock

CHUNK_BYTES = 65_536
KEY = b"k" * 36
LOAD, STORE = Operation.LOAD, Operation.STORE
EXPAND_S = 0.001
#: The link's time per byte at which compression by a factor of 1.49 neither saves nor costs time.
EVEN_S = EXPAND_S / CHUNK_BYTES / (1 - 1 / 1.49)


class Coder(Planes):
    """A coder that needs the same virtual time to decode every chunk."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__("bfloat16")
        self._clock = clock

    def decode(self, memory: memoryview, stored_bytes: int, payload_bytes: int) -> None:  # type: ignore[override]
        super().decode(memory, stored_bytes, payload_bytes)
        self._clock.advance(EXPAND_S)


class Link:
    """A tier with a latency for each call, and a bandwidth that concurrent calls share."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.latency_s = self.byte_s = 0.0
        self.calls_at_once = 1
        self.error: TierError | None = None

    async def transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> list[TierError | None]:
        stored_bytes = sum(len(transfer.payload) for transfer in batch)
        await asyncio.sleep(self.latency_s + self.byte_s * stored_bytes * self.calls_at_once)
        return [self.error for _ in batch]


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.link = Link(self.clock)
        link: Any = self.link
        log = TierLog("link", self.clock)
        self.gate = CompressionGate(link, Coder(self.clock), 512, self.clock, log)
        self.loop = self.clock.new_event_loop()

    def run(self, operation: Operation, *chunks: float, at_once: int = 1) -> None:
        """For each number of chunks, transfer ``at_once`` concurrent batches of that size."""
        self.link.calls_at_once = at_once

        async def call() -> None:
            for count in chunks:
                calls = [self.gate.transfer(operation, batch_of(count)) for _ in range(at_once)]
                await asyncio.gather(*calls)

        self.loop.run_until_complete(call())

    def is_open(self, chunk: bytes = b"") -> bool:
        plain = memoryview(chunk or floats(KEY, CHUNK_BYTES))
        self.gate.try_out(plain, memoryview(bytearray(CHUNK_BYTES)))
        self.gate.decide()
        return self.gate.is_open


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(4))
    made = Bench()
    yield made
    made.loop.close()


def batch_of(count: float) -> list[Transfer]:
    """Return ``count`` chunks. With a fraction, the last is short, like a compressed chunk."""
    payload = memoryview(bytearray(round(count * CHUNK_BYTES)))
    starts = range(0, len(payload), CHUNK_BYTES)
    parts = [payload[start : start + CHUNK_BYTES] for start in starts]
    return [Transfer(KEY, RequestContext("r"), memoryview(b""), part) for part in parts]


@pytest.mark.parametrize("operation", [LOAD, STORE])
@pytest.mark.parametrize("chunks", [(1,) * 8, (1, 2, 3, 4) * 2])
@pytest.mark.parametrize(("speed", "opens"), [(0.9, False), (1.5, True), (20, True)])
def test_it_opens_where_the_link_is_slow(bench, operation, chunks, speed, opens):
    bench.link.byte_s = speed * EVEN_S
    bench.run(operation, *chunks)
    assert bench.is_open() is opens


def test_latency_is_no_reason(bench):
    bench.link.latency_s = 1.0
    bench.run(LOAD, 1, 2, 3, 4, 1, 2, 3, 4)
    assert not bench.is_open()


def test_latency_of_equal_calls_is_known_once_some_are_compressed(bench):
    bench.link.latency_s = 1.0
    bench.run(LOAD, *(1,) * 8)
    assert bench.is_open(), "it could be the link"
    bench.run(LOAD, *(0.7,) * 8)
    assert not bench.is_open()
    bench.run(LOAD, *(1,) * 1000)
    assert not bench.is_open()


def test_loads_count_more_than_stores(bench):
    bench.link.byte_s = 20 * EVEN_S
    bench.run(STORE, *(1,) * 8)
    assert bench.is_open()
    bench.link.byte_s = 0.1 * EVEN_S
    bench.run(LOAD, *(1,) * 7)
    assert bench.is_open(), "seven loads are too few"
    bench.run(LOAD, 1)
    assert not bench.is_open()


def test_calls_that_run_at_once_share_the_link_and_expand_at_once(bench):
    bench.link.byte_s = 0.5 * EVEN_S
    bench.run(LOAD, *(1,) * 8)
    assert not bench.is_open()
    bench.run(LOAD, *(1,) * 64, at_once=4)
    assert bench.is_open(), "four cores are idle"
    bench.link.byte_s = 0.2 * EVEN_S
    bench.run(LOAD, *(1,) * 64, at_once=4)
    assert not bench.is_open(), "a call lasts four times as long only because of the others"


def test_busy_cores_expand_nothing_at_once(bench, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (4.0, 4.0, 4.0))
    bench.link.byte_s = 0.5 * EVEN_S
    bench.run(LOAD, *(1,) * 64, at_once=4)
    assert not bench.is_open()


def test_between_gain_and_loss_it_stays_as_it_is(bench, caplog):
    caplog.set_level(logging.INFO)
    bench.link.byte_s = 1.1 * EVEN_S
    bench.run(LOAD, *(1,) * 64)
    assert not bench.is_open()
    assert not caplog.messages
    bench.link.byte_s = 2 * EVEN_S
    bench.run(LOAD, *(1,) * 64)
    assert bench.is_open()
    bench.link.byte_s = 1.1 * EVEN_S
    bench.run(LOAD, *(1,) * 64)
    assert bench.is_open()
    assert caplog.messages == [
        "link: compresses chunks: a chunk becomes 1.49 times smaller and arrives 2.00 ms sooner; "
        "expanding it takes 1.00 ms"
    ]


def test_what_does_not_shrink_is_stored_as_it_is(bench):
    bench.link.byte_s = 20 * EVEN_S
    bench.run(LOAD, *(1,) * 8)
    assert not bench.is_open(np.random.default_rng(0).bytes(CHUNK_BYTES))


def test_failed_loads_tell_nothing(bench):
    bench.link.byte_s = 20 * EVEN_S
    bench.link.error = TierError("no")
    bench.run(LOAD, *(1,) * 8)
    assert not bench.is_open()


def test_it_is_tried_out_with_the_first_stores_and_then_with_some(bench):
    tried = [number for number in range(1, 100) if bench.gate.begin_store()]
    assert tried == [*range(1, 17), 32, 48, 64, 80, 96]
