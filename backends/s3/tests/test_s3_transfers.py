"""Transfers: no copies, stalled connections, responses that end a connection."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from support.copies import ByteLedger, traced_peak
from support.s3_server import S3Server

from kvtier_s3.http import request
from kvtier_sdk import (
    Connection,
    SystemClock,
    TierTimeoutError,
    TierUnavailableError,
)

KEYS = [index.to_bytes(20, "big") for index in range(20)]
CHUNK_BYTES = 4 * 2**20


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, monkeypatch, operation):
    bench.chunk_bytes = CHUNK_BYTES
    ledger = ByteLedger(monkeypatch, "readv", "writev")
    tier = await bench.open(bench.url, conditional_put=False)
    full = [bench.full(key) for key in KEYS[:8]]
    assert await tier.store(full) == [None] * 8
    batch = full if operation == "store" else [bench.empty(key) for key in KEYS[:8]]
    ledger.begin(batch)
    with traced_peak() as peak:
        assert await getattr(tier, operation)(batch) == [None] * 8
    assert all(map(bench.holds, batch))
    # Every byte moved once, to or from its own place, except those received with a response's head.
    heads_bytes = 8 * 3072
    assert 0 <= 8 * bench.object_bytes - ledger.direct_bytes < heads_bytes
    assert ledger.other_bytes < heads_bytes
    assert peak.allocated_bytes < 256 * 1024


async def test_connections_are_kept_and_bounded(bench, proxy):
    tier = await bench.open(bench.url_of(endpoint=await proxy.start()), connections=3)
    others = proxy.connections - 1  # one made when it was opened is one of the three
    for _ in range(3):
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
        assert await bench.has(tier, *KEYS) == [True] * 20
    assert proxy.connections - others == 3


async def test_stores_that_hang_leave_connections_to_reads(bench, scripted, make_reply):
    tier = await bench.open(scripted.url(read_timeout="20s"))
    others = scripted.connections - 1
    scripted.answers_puts.clear()
    store = asyncio.create_task(bench.put(tier, *KEYS))
    while not any("if-none-match" in request.headers for request in scripted.requests):
        await asyncio.sleep(0)
    assert await bench.has(tier, *KEYS) == [True] * 20
    scripted.answers = [make_reply(200, bench.content(KEYS[0]))]
    assert await bench.loads(tier, KEYS[0])
    assert not store.done()
    scripted.answers_puts.set()
    assert await store == [None] * 20
    assert scripted.connections - others <= tier.config.connections


async def test_no_server(bench, tmp_path):
    with pytest.raises(TierUnavailableError, match="no connection to 127.0.0.1:"):
        await bench.open(S3Server(tmp_path).url)


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


@asynccontextmanager
async def peer_that_says(answer: bytes):
    """Open a connection to a server that sends a response, reads nothing, and waits."""
    leave = asyncio.Event()

    async def serve(reader, writer):
        writer.write(answer)
        await leave.wait()
        writer.close()

    # Its buffers take only a little.
    peer = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    address = peer.sockets[0].getsockname()
    connection = await Connection.connect(address, clock=SystemClock(), timeout_s=10)
    yield connection
    leave.set()
    connection.close("the test is over")
    peer.close()


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n", 1000),
        (b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", 0),
        (b"HTTP/1.1 500 No\r\n\r\n", 0),
    ],
)
async def test_a_connection_on_which_no_response_can_follow_is_closed(answer, target):
    async with peer_that_says(answer) as connection:
        await request(connection, [b"GET / HTTP/1.1\r\n\r\n"], [memoryview(bytearray(target))])
        # It closes at once: the next request would take the rest for its response.
        assert not connection.is_usable


async def test_nothing_is_sent_after_the_response():
    content = memoryview(bytearray(64 * 2**20))  # more than the sockets between hold
    answer = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n"
    async with peer_that_says(answer) as connection, asyncio.timeout(30):
        assert (await request(connection, [b"PUT", content])).status == 503
        assert not connection.is_usable
