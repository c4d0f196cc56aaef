"""On the way: nothing copied, connections that break or stall, cancellations, restarts."""

from __future__ import annotations

import asyncio
import os
import socket
import tracemalloc

import numpy as np
import pytest
from support.s3_server import S3Server

from kvtier_s3.wire import Wire
from kvtier_sdk import CorruptChunkError, TierTimeoutError, TierUnavailableError

KEYS = [index.to_bytes(20, "big") for index in range(20)]
CHUNK_BYTES = 4 * 2**20


def address_of(view) -> int:
    return np.frombuffer(view, np.uint8).ctypes.data


class Ledger:
    """Counts the bytes that move, by whether they move between the wire and a transfer."""

    def __init__(self) -> None:
        self.spans = []
        self.direct_bytes = 0
        self.other_bytes = 0

    def begin(self, transfers) -> None:
        self.spans = [
            (address_of(view), address_of(view) + len(view))
            for transfer in transfers
            for view in transfer.buffers
        ]
        self.direct_bytes = 0
        self.other_bytes = 0

    def note(self, view, count_bytes: int) -> None:
        at = address_of(view) if len(view) else 0
        if any(start <= at < end for start, end in self.spans):
            self.direct_bytes += count_bytes
        else:
            self.other_bytes += count_bytes

    def watch(self, monkeypatch) -> None:
        get_buffer, updated, writev = Wire.get_buffer, Wire.buffer_updated, os.writev
        rooms = {}

        def noting_room(wire, sizehint):
            rooms[wire] = get_buffer(wire, sizehint)
            return rooms[wire]

        def noting_bytes(wire, nbytes):
            self.note(rooms.pop(wire), nbytes)
            updated(wire, nbytes)

        def noting_sent(descriptor, views):
            sent_bytes = left_bytes = writev(descriptor, views)
            for view in views:
                self.note(view, min(left_bytes, len(view)))
                left_bytes -= min(left_bytes, len(view))
            return sent_bytes

        monkeypatch.setattr(Wire, "get_buffer", noting_room)
        monkeypatch.setattr(Wire, "buffer_updated", noting_bytes)
        monkeypatch.setattr(os, "writev", noting_sent)


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_a_payload_moves_between_the_wire_and_its_slot_and_nowhere_else(
    bench, monkeypatch, operation
):
    bench.chunk_bytes = CHUNK_BYTES
    ledger = Ledger()
    ledger.watch(monkeypatch)  # now: a loop looks its protocol's methods up once
    tier = await bench.open(bench.url, conditional_put=False)
    full = [bench.full(key) for key in KEYS[:8]]
    assert await tier.store(full) == [None] * 8
    batch = full if operation == "store" else [bench.empty(key) for key in KEYS[:8]]
    ledger.begin(batch)
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        assert await getattr(tier, operation)(batch) == [None] * 8
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(map(bench.holds, batch))
    # All moved once, to or from its own place, but what came in one piece with an answer's head.
    heads_bytes = 8 * 3072
    assert 0 <= 8 * bench.object_bytes - ledger.direct_bytes < heads_bytes
    assert ledger.other_bytes < heads_bytes
    assert peak_bytes - before_bytes < 256 * 1024


@pytest.mark.parametrize("passed_bytes", [0, 3, 9, 40, 300, 500, 60_000, 100_100])
async def test_a_connection_cut_in_mid_body(bench, proxy, passed_bytes):
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=1)
    await bench.put(tier, KEYS[0])
    proxy.limit("client", passed_bytes, "cut")
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, TierUnavailableError)
    assert verdict.retryable
    proxy.release()
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize("passed_bytes", [0, 20, 70, 700, 60_000, 100_000])
async def test_a_store_cut_in_mid_body_leaves_nothing(bench, proxy, passed_bytes):
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=1)
    await bench.put(tier, KEYS[1])
    proxy.limit("server", passed_bytes, "cut")
    (verdict,) = await bench.put(tier, KEYS[0])
    assert isinstance(verdict, TierUnavailableError)
    proxy.release()
    assert await bench.has(tier, *KEYS[:2]) == [False, True]
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, *KEYS[:2])


@pytest.mark.parametrize("passed_bytes", [0, 30, 2**20])
async def test_after_a_cancelled_load_nothing_touches_the_buffers(bench, proxy, passed_bytes):
    bench.chunk_bytes = CHUNK_BYTES
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=1)
    await bench.put(tier, KEYS[0])
    proxy.limit("client", passed_bytes, "hold")
    target = bench.empty(KEYS[0])
    task = asyncio.create_task(tier.load([target]))
    await proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    target.payload[:] = b"n" * len(target.payload)
    proxy.release()
    # Another chunk comes through, and so would what was on the way have.
    assert await bench.loads(tier, KEYS[0])
    assert bytes(target.payload) == b"n" * len(target.payload)


@pytest.mark.parametrize("passed_bytes", [0, 30, 2**20])
async def test_after_a_cancelled_store_the_buffers_are_free(bench, proxy, passed_bytes):
    bench.chunk_bytes = 32 * 2**20  # more than the sockets between hold
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=1)
    proxy.limit("server", passed_bytes, "hold")
    source = bench.full(KEYS[0])
    task = asyncio.create_task(tier.store([source]))
    await proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    source.payload[:] = b"n" * len(source.payload)
    proxy.release()
    assert await bench.put(tier, KEYS[1]) == [None]
    # What was given up is not there, in part or in a mixture.
    assert await bench.has(tier, *KEYS[:2]) == [False, True]


async def test_a_cancelled_batch_leaves_the_tier_usable(bench, proxy):
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=3)
    await bench.put(tier, *KEYS)
    proxy.limit("client", 250_000, "hold")
    task = asyncio.create_task(tier.load([bench.empty(key) for key in KEYS]))
    await proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    proxy.release()
    assert await bench.loads(tier, *KEYS)


async def test_connections_are_kept_and_bounded(bench, proxy):
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=3)
    others = proxy.connections - 1  # one made when it was opened is one of the three
    for _ in range(3):
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
        assert await bench.has(tier, *KEYS) == [True] * 20
    assert proxy.connections - others == 3


async def test_killed_and_restarted_in_the_middle_of_transfers(bench, tmp_path):
    bench.chunk_bytes = 2**20
    with S3Server(tmp_path) as server:
        bench.server = server
        tier = await bench.open(bench.url)
        await bench.put(tier, *KEYS)
        outcomes = []

        async def keep_moving(number):
            while True:
                for key in KEYS[number::4]:
                    target = bench.empty(key)
                    (loaded,) = await tier.load([target])
                    assert loaded is not None or bench.holds(target)
                    (stored,) = await bench.put(tier, key)
                    outcomes.extend((loaded, stored))
                    if loaded is not None:
                        await asyncio.sleep(0.001)

        movers = [asyncio.create_task(keep_moving(number)) for number in range(4)]

        async def until(condition):
            start = len(outcomes)
            while not any(map(condition, outcomes[start:])):
                for mover in movers:
                    assert not mover.done() or mover.result()
                await asyncio.sleep(0.005)

        await until(lambda outcome: outcome is None)
        server.kill()
        await until(lambda outcome: isinstance(outcome, TierUnavailableError))
        with pytest.raises(TierUnavailableError):
            await bench.has(tier, KEYS[0])
        with pytest.raises(TierUnavailableError):
            await tier.delete(KEYS[:1])
        with pytest.raises(TierUnavailableError):
            _ = [entry async for entry in tier.scan()]
        await asyncio.to_thread(server.start)
        await until(lambda outcome: outcome is None)
        for mover in movers:
            mover.cancel()
        await asyncio.gather(*movers, return_exceptions=True)
        # Not reached for a while; never damaged, never gone.
        assert not any(isinstance(outcome, CorruptChunkError) for outcome in outcomes)
        assert await bench.loads(tier, *KEYS)
        await bench.close()


async def test_nobody_there(bench, tmp_path):
    with pytest.raises(TierUnavailableError, match="no connection to 127.0.0.1:"):
        await bench.open(S3Server(tmp_path).url)


async def test_somebody_who_never_answers(bench):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(TierTimeoutError, match="nothing moved for 0.2 s"):
            await bench.open(bench.url_of(endpoint=endpoint), read_timeout="200ms")


async def test_a_server_that_falls_silent_in_mid_body(bench, proxy):
    endpoint = await proxy.start()
    tier = await bench.open(bench.url_of(endpoint=endpoint), connections=1, read_timeout="300ms")
    await bench.put(tier, KEYS[0])
    proxy.limit("client", 50_000, "hold")
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert type(verdict) is TierTimeoutError
    assert verdict.retryable
    proxy.release()
    assert await bench.loads(tier, KEYS[0])
