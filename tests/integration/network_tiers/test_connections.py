from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

from kvtier_sdk import TierTimeoutError, TierUnavailableError

CHUNK_BYTES = 4 * 2**20
# Larger than the sockets' buffers, so that a transfer can stop in the middle.
LONG_BYTES = 32 * 2**20

_numbers = itertools.count()


@pytest.fixture
def keys() -> list[bytes]:
    return [next(_numbers).to_bytes(20, "big") for _ in range(20)]


@pytest.mark.parametrize("passed_bytes", [0, 30, 2**20])
async def test_a_cancelled_load_leaves_its_buffers_alone(network, keys, passed_bytes):
    bench = network.bench
    bench.chunk_bytes = CHUNK_BYTES
    tier = await network.open()
    await bench.put(tier, keys[0])
    network.proxy.limit("client", passed_bytes, "hold")
    target = bench.empty(keys[0])
    task = asyncio.create_task(tier.load([target]))
    await network.proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    target.payload[:] = b"n" * len(target.payload)
    network.proxy.release()
    # While the second load runs, the rest of the first response has time to arrive. The buffer of
    # the cancelled load must still hold the bytes that the test wrote after the cancellation.
    assert await bench.loads(tier, keys[0])
    assert bytes(target.payload) == b"n" * len(target.payload)


@pytest.mark.parametrize("passed_bytes", [0, 30, 2**20])
async def test_a_cancelled_store_leaves_its_buffers_alone(network, keys, passed_bytes):
    bench = network.bench
    bench.chunk_bytes = LONG_BYTES
    tier = await network.open()
    network.proxy.limit("server", passed_bytes, "hold")
    source = bench.full(keys[0])
    task = asyncio.create_task(tier.store([source]))
    await network.proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    source.payload[:] = b"n" * len(source.payload)
    network.proxy.release()
    assert await bench.put(tier, keys[1]) == [None]
    # The server has discarded the partly sent chunk.
    assert await bench.has(tier, *keys[:2]) == [False, True]


@pytest.mark.parametrize("connections", [1, 3])
async def test_batches_at_once_do_not_mix(network, keys, connections):
    bench = network.bench
    bench.chunk_bytes = CHUNK_BYTES
    tier = await network.open(connections=connections)
    halves = keys[:3], keys[3:6]
    assert await asyncio.gather(*(bench.put(tier, *half) for half in halves)) == [[None] * 3] * 2
    assert await asyncio.gather(*(bench.loads(tier, *half) for half in halves)) == [True, True]


@pytest.mark.parametrize("ending", ["cut", "reset"])
@pytest.mark.parametrize("passed_bytes", [0, 3, 9, 40, 80, 300, 500, 60_000, 100_000])
async def test_an_end_in_the_middle_of_a_load(network, keys, ending, passed_bytes):
    bench = network.bench
    tier = await network.open()
    await bench.put(tier, keys[0])
    network.proxy.limit("client", passed_bytes, ending)
    async with asyncio.timeout(20):
        (verdict,) = await tier.load([bench.empty(keys[0])])
    assert isinstance(verdict, TierUnavailableError)
    assert verdict.retryable
    network.proxy.release()
    assert await bench.loads(tier, keys[0])


@pytest.mark.parametrize("ending", ["cut", "reset"])
@pytest.mark.parametrize("passed_bytes", [0, 20, 70, 700, 60_000, 100_000])
async def test_an_end_in_the_middle_of_a_store_leaves_nothing(network, keys, ending, passed_bytes):
    bench = network.bench
    tier = await network.open()
    await bench.put(tier, keys[1])
    network.proxy.limit("server", passed_bytes, ending)
    async with asyncio.timeout(20):
        (verdict,) = await bench.put(tier, keys[0])
    assert isinstance(verdict, TierUnavailableError)
    network.proxy.release()
    assert await bench.has(tier, *keys[:2]) == [False, True]
    assert await bench.put(tier, keys[0]) == [None]
    assert await bench.loads(tier, *keys[:2])


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_a_silent_server_costs_one_connection(network, keys, operation):
    bench = network.bench
    tier = await network.open()
    await bench.put(tier, *keys[:2])
    before = network.proxy.connections
    network.proxy.limit("server", 0, "hold")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await getattr(tier, operation)([bench.full(keys[1])])
    network.proxy.release()
    assert await bench.loads(tier, keys[0])
    assert network.proxy.connections == before + 1


async def test_a_server_that_never_replies(network):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        scheme = network.url("http://x").partition(":")[0]
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"
        url, option = network.url(place), "read_timeout"
        if scheme != "s3":
            url, option = place.replace("http", "redis"), "connect_timeout"
        with pytest.raises(TierTimeoutError):
            await network.bench.open(url, **{option: "200ms"})
