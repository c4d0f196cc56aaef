"""On the way: nothing copied, connections that break or stall, cancellations, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import AsyncIterator

import pytest
from support.copies import ByteLedger, traced_peak

from kvtier_redis.answers import Answer, Kind
from kvtier_redis.dialling import Dialler
from kvtier_redis.wire import Exchange, Wire
from kvtier_sdk import (
    CorruptChunkError,
    SystemClock,
    TierSpec,
    TierTimeoutError,
    TierUnavailableError,
)

KEYS = [index.to_bytes(20, "big") for index in range(20)]
CHUNK_BYTES = 4 * 2**20


@pytest.fixture
async def proxy(server, make_proxy) -> AsyncIterator[object]:
    proxy = make_proxy(server.port)
    yield proxy
    await proxy.close()


def connected_wire(port: int) -> Wire:
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    return Wire(sock, "peer")


@contextlib.asynccontextmanager
async def wire_to(talk) -> AsyncIterator[Wire]:
    """A connection to a server that talks once, as it is told; afterwards both have ended."""
    left = asyncio.Event()

    async def serve(reader, writer):
        await talk(reader, writer)
        writer.close()
        left.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as peer:
        wire = connected_wire(peer.sockets[0].getsockname()[1])
        yield wire
        wire.close("the end")
        await left.wait()


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, server, monkeypatch, operation):
    bench.chunk_bytes = CHUNK_BYTES
    ledger = ByteLedger(monkeypatch, "readv", "writev")
    tier = await bench.open(server.url)
    full = [bench.full(key) for key in KEYS[:8]]
    assert await tier.store(full) == [None] * 8
    batch = full if operation == "store" else [bench.empty(key) for key in KEYS[:8]]
    ledger.begin(batch)
    with traced_peak() as peak:
        assert await getattr(tier, operation)(batch) == [None] * 8
    assert all(map(bench.holds, batch))
    # Every byte of header and payload moved between the wire and its own place, once.
    assert ledger.direct_bytes == 8 * bench.object_bytes
    assert ledger.other_bytes < 8 * 200
    assert peak.allocated_bytes < 256 * 1024


@pytest.mark.parametrize("passed_bytes", [0, 3, 9, 10, 40, 74, 80, 60_000, 100_074])
async def test_a_connection_cut_in_mid_value(bench, proxy, passed_bytes):
    tier = await bench.open(await proxy.start(), connections=1)
    await bench.put(tier, KEYS[0])
    proxy.limit("client", passed_bytes, "cut")
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, TierUnavailableError)
    assert verdict.retryable
    proxy.release()
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize("passed_bytes", [0, 20, 70, 60_000, 100_000])
async def test_a_store_cut_in_mid_value_leaves_nothing(bench, server, proxy, passed_bytes):
    tier = await bench.open(await proxy.start(), connections=1)
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
    tier = await bench.open(await proxy.start(), connections=1)
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
async def test_after_a_cancelled_store_the_buffers_are_free(bench, server, proxy, passed_bytes):
    bench.chunk_bytes = 32 * 2**20  # more than the sockets between hold
    tier = await bench.open(await proxy.start(), connections=1)
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


async def test_after_cancelled_stores_no_chunk_is_a_mixture(bench, server, proxy):
    tier = await bench.open(await proxy.start(), connections=1)
    batch = [bench.full(key) for key in KEYS]
    # They are under way together; this many bytes are some of them, and a part of one.
    proxy.limit("server", 7 * bench.object_bytes, "hold")
    task = asyncio.create_task(tier.store(batch))
    await proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for transfer in batch:
        transfer.payload[:] = b"n" * len(transfer.payload)
    proxy.release()
    there = [key for key, found in zip(KEYS, await bench.has(tier, *KEYS), strict=True) if found]
    assert await bench.loads(tier, *there)
    assert KEYS[-1] not in there
    assert await bench.put(tier, *KEYS) == [None] * 20
    assert await bench.loads(tier, *KEYS)


@pytest.mark.parametrize("piece_bytes", [1, 7, 100])
async def test_stores_under_way_together_have_each_its_own_answer(piece_bytes):
    said = [b"+OK", b"-OOM command not allowed", b"+OK", b"-MOVED 7 h:1", b"+OK"]
    requests = [Exchange(b"%d" % number, [b"<", b"payload", b">"]) for number in range(5)]

    async def talk(reader, writer):
        # All of them come before any is answered.
        await reader.readexactly(5 * len(b"<payload>"))
        text = b"\r\n".join([*said, b""])
        for start in range(0, len(text), piece_bytes):
            writer.write(text[start : start + piece_bytes])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with wire_to(talk) as wire:
        await wire.carry(deque(requests), 5)
        texts = [request.outcome.text for request in requests]
        assert texts == [line.decode()[1:] for line in said]
        assert wire.is_usable


async def test_of_stores_under_way_together_only_those_answered_are_known(bench, server, proxy):
    tier = await bench.open(await proxy.start(), connections=1)
    await bench.put(tier, KEYS[0])
    proxy.limit("client", 3 * len(b"+OK\r\n"), "cut")
    verdicts = await bench.put(tier, *KEYS)
    # A connection that is reset may take with it what had arrived.
    known = [verdict is None for verdict in verdicts].index(False)
    assert known <= 3
    assert all(isinstance(verdict, TierUnavailableError) for verdict in verdicts[known:])
    proxy.release()
    assert await bench.loads(tier, *KEYS[:known])
    assert await bench.put(tier, *KEYS) == [None] * 20


async def test_a_cancelled_batch_leaves_the_tier_usable(bench, proxy):
    tier = await bench.open(await proxy.start(), connections=3)
    await bench.put(tier, *KEYS)
    proxy.limit("client", 250_000, "hold")
    task = asyncio.create_task(tier.load([bench.empty(key) for key in KEYS]))
    await proxy.spent.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    proxy.release()
    assert await bench.loads(tier, *KEYS)


async def test_connections_are_kept_and_bounded(bench, server, proxy):
    tier = await bench.open(await proxy.start(), connections=3)
    others = proxy.connections
    for _ in range(5):
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
    assert proxy.connections - others == 3


async def test_a_connection_that_idled_too_long_is_replaced(bench, server):
    tier = await bench.open(server.url)
    await bench.put(tier, *KEYS[:4])
    server.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await asyncio.sleep(0.05)
    assert await bench.loads(tier, *KEYS[:4])
    assert await bench.has(tier, KEYS[0]) == [True]


async def test_killed_and_restarted_in_the_middle_of_transfers(bench, server):
    bench.chunk_bytes = 2**20
    tier = await bench.open(server.url)
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
    await asyncio.to_thread(server.start)
    await until(lambda outcome: outcome is None)
    for mover in movers:
        mover.cancel()
    await asyncio.gather(*movers, return_exceptions=True)
    # Gone with the server, or not reached; never damaged.
    assert not any(isinstance(outcome, CorruptChunkError) for outcome in outcomes)
    assert await bench.put(tier, *KEYS) == [None] * 20
    assert await bench.loads(tier, *KEYS)


async def test_nobody_there(bench, make_server):
    server = make_server()
    with pytest.raises(TierUnavailableError):
        await bench.open(server.url)


async def test_somebody_who_never_answers(bench):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TierTimeoutError):
            await bench.open(f"redis://127.0.0.1:{port}", connect_timeout="200ms")


async def test_a_connection_is_made_when_the_server_has_answered():
    config = TierSpec.from_url("redis:", connect_timeout="200ms").config
    # The system accepts for a server that hangs.
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TierTimeoutError, match="no connection to"),
    ):
        await Dialler(config, SystemClock()).dial(silent.getsockname())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"+OK\r\n+OK\r\n", b"\0" * 100, b"*1\r\n"]
)
async def test_somebody_who_speaks_otherwise(answer):
    async def talk(reader, writer):
        await reader.read(100)
        writer.write(answer)
        with contextlib.suppress(OSError):
            await reader.read()

    async with wire_to(talk) as wire:
        with pytest.raises(TierUnavailableError, match="connection to peer lost: the server sent"):
            await wire.call([b"PING\r\n"])
        assert not wire.is_usable
        with pytest.raises(TierUnavailableError):
            await wire.call([b"PING\r\n"])


@pytest.mark.parametrize(
    ("answer", "is_load"),
    [
        *((answer, False) for answer in (b"$-1", b"$3\r\nfoo", b":0", b"+QUEUED", b"+PONG")),
        *((answer, True) for answer in (b"+OK", b":1")),
    ],
)
async def test_an_answer_of_the_wrong_kind_is_neither_success_nor_damage(answer, is_load):
    async def talk(reader, writer):
        await reader.read(100)
        writer.write(answer + b"\r\n")
        await reader.read()

    target = [memoryview(bytearray(10))] if is_load else []
    async with wire_to(talk) as wire:
        with pytest.raises(TierUnavailableError, match="the server sent what is no answer"):
            await wire.call([b"request\r\n"], target)
        assert not wire.is_usable


async def test_a_connection_with_another_length_on_its_way_is_of_no_more_use(server):
    server.ask("SET", "k", b"x" * 1000)
    wire = connected_wire(server.port)
    answer = await wire.call([b"GET k\r\n"], [memoryview(bytearray(10))])
    assert answer == Answer(Kind.OTHER_LENGTH, "1000")
    # At once: a request that was made before the rest arrives would take it for its answer.
    assert not wire.is_usable


async def test_a_server_that_answers_before_it_has_been_asked_in_full():
    async def talk(reader, writer):
        await reader.read(100)
        writer.write(b"-ERR too long\r\n")
        await asked.wait()
        writer.transport.abort()

    asked = asyncio.Event()
    async with wire_to(talk) as wire:
        # More than the sockets between hold.
        assert await wire.call([b"SET", bytes(32 * 2**20)]) == Answer(Kind.ERROR, "ERR too long")
        assert not wire.is_usable
        asked.set()


@pytest.mark.parametrize("case", ["there", "missing", "longer", "shorter", "stored"])
async def test_when_a_call_has_returned_no_buffer_is_held(bench, server, case):
    tier = await bench.open(server.url)
    lengths = {"longer": 2 * bench.object_bytes, "shorter": 100}
    for key in KEYS:
        if case in lengths:
            server.ask("SET", bench.name(key), b"x" * lengths[case])
        elif case == "there":
            await bench.put(tier, key)
    batch = [bench.full(key) for key in KEYS]
    memory = [view.obj for transfer in batch for view in transfer.buffers]
    verdicts = await (tier.store(batch) if case == "stored" else tier.load(batch))
    assert [verdict is None for verdict in verdicts] == [case in ("there", "stored")] * len(KEYS)
    batch.clear()
    for one in memory:
        one.clear()  # raises where a view of it is left


async def test_a_batch_goes_on_with_the_connections_that_it_gets(bench, server):
    tier = await bench.open(server.url, connections=4)
    with server.client() as admin:
        # One is redis-py's, one asks here, and so two are left of four.
        taken = admin.info("clients")["connected_clients"]
        admin.config_set("maxclients", taken + 2)
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
        assert admin.info("stats")["rejected_connections"] > 0


async def test_a_server_out_of_reach_is_tried_once_for_each_connection(bench, server, monkeypatch):
    tier = await bench.open(server.url, connections=3)
    server.kill()
    attempts = []
    dial = Dialler.dial

    async def noting_dial(dialler, address):
        attempts.append(address)
        return await dial(dialler, address)

    monkeypatch.setattr(Dialler, "dial", noting_dial)
    verdicts = await tier.load([bench.empty(key) for key in KEYS])
    assert [type(verdict) for verdict in verdicts] == [TierUnavailableError] * 20
    assert len(attempts) == 3


async def test_a_small_load_does_not_wait_for_all_of_a_long_store(bench, server):
    bench.chunk_bytes = 2**20
    tier = await bench.open(server.url, connections=1)
    await bench.put(tier, KEYS[0])
    ended = []

    async def noted(name, call):
        assert await call
        ended.append(name)

    await asyncio.gather(
        noted("store", bench.put(tier, *KEYS[1:])), noted("load", bench.loads(tier, KEYS[0]))
    )
    assert ended == ["load", "store"]
