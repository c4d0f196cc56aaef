import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from support.copies import ByteLedger, check_no_copies, traced_peak
from support.peer import open_peer, settle
from support.proxy import Proxy

from kvtier_redis.connector import Connector
from kvtier_redis.resp import Kind, Reply, call
from kvtier_sdk import SystemClock, TierSpec, TierTimeoutError, TierUnavailableError

KEYS = [index.to_bytes(20, "big") for index in range(20)]
CHUNK_BYTES = 4 * 2**20


@pytest.fixture
async def proxy(server) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.port, "redis")
    yield proxy
    await proxy.close()


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, server, monkeypatch, operation):
    bench.chunk_bytes = CHUNK_BYTES
    ledger = ByteLedger(monkeypatch, "readv", "writev")
    await check_no_copies(bench, await bench.open(server.url), ledger, operation)


async def test_values_of_one_short_length_are_copied_only_at_first(bench, server, monkeypatch):
    bench.chunk_bytes = CHUNK_BYTES
    tier = await bench.open(server.url)
    stored = [bench.full(key) for key in KEYS]
    await tier.store([one.with_payload(one.payload[:800_000]) for one in stored])
    assert await tier.load([bench.empty(KEYS[0])]) == [None]
    batch = [bench.empty(key) for key in KEYS[1:9]]
    ledger = ByteLedger(monkeypatch, "readv")
    ledger.begin(batch)
    with traced_peak() as peak:
        assert await tier.load(batch) == [None] * 8
    assert ledger.other_bytes < 8 * 200
    assert peak.allocated_bytes < 256 * 1024


async def test_of_stores_sent_together_those_with_a_reply_are_stored(bench, server, proxy):
    tier = await bench.open(await proxy.start(), connections=1)
    await bench.put(tier, KEYS[0])
    proxy.limit("client", 3 * len(b"+OK\r\n"), "cut")
    verdicts = await bench.put(tier, *KEYS)
    # The tier may read fewer than three replies, because a reset can discard unread replies.
    known = [verdict is None for verdict in verdicts].index(False)
    assert known <= 3
    assert all(isinstance(verdict, TierUnavailableError) for verdict in verdicts[known:])
    proxy.release()
    assert await bench.loads(tier, *KEYS[:known])
    assert await bench.put(tier, *KEYS) == [None] * 20


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


async def test_a_connection_is_made_when_the_server_has_replied():
    config = TierSpec.from_url("redis:", connect_timeout="200ms").config
    # The kernel accepts connections for this socket, but nothing replies.
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(TierTimeoutError, match="no reply from 127.0.0.1:.* within 0.2 s"),
    ):
        await Connector(config, SystemClock()).connect(silent.getsockname())


async def test_a_server_that_replies_before_it_has_the_whole_request():
    with open_peer() as peer:
        # The sockets' buffers cannot hold the request, so the reply comes while the client sends.
        calling = asyncio.ensure_future(call(peer.connection, b"SET", bytes(32 * 2**20)))
        await settle()
        await peer.send(b"-ERR too long\r\n")
        assert await calling == Reply(Kind.ERROR, "ERR too long")
        assert not peer.connection.is_usable


async def test_a_batch_goes_on_with_the_connections_that_it_gets(bench, server):
    tier = await bench.open(server.url, connections=4)
    with server.client() as admin:
        # Let the server accept only two of the four connections that the tier would open.
        taken = admin.info("clients")["connected_clients"]
        admin.config_set("maxclients", taken + 2)
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
        assert admin.info("stats")["rejected_connections"] > 0


async def test_a_server_out_of_reach_is_tried_once_for_each_connection(bench, server, monkeypatch):
    attempts = []
    connect = Connector.connect

    async def noting_connect(connector, address, **options):
        attempts.append(address)
        return await connect(connector, address, **options)

    monkeypatch.setattr(Connector, "connect", noting_connect)
    tier = await bench.open(server.url, connections=3)
    server.kill()
    attempts.clear()
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
