import asyncio

import pytest
from support.copies import ByteLedger, check_no_copies

KEYS = [index.to_bytes(20, "big") for index in range(20)]
CHUNK_BYTES = 4 * 2**20


@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, monkeypatch, operation):
    bench.chunk_bytes = CHUNK_BYTES
    ledger = ByteLedger(monkeypatch, "readv", "writev")
    tier = await bench.open(bench.url, conditional_put=False)
    await check_no_copies(bench, tier, ledger, operation, heads_bytes=8 * 3072)


async def test_connections_are_kept_and_bounded(bench, proxy):
    url = bench.url_of(endpoint=await proxy.start())
    tier = await bench.open(url, connections=3, lookup_connections=2)
    others = proxy.connections - 1  # opening has made one of the tier's 3 + 2 connections
    for _ in range(3):
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
        assert await bench.has(tier, *KEYS) == [True] * 20
    assert proxy.connections - others == 3 + 2


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
    config = tier.config
    assert scripted.connections - others <= config.connections + config.lookup_connections


async def test_lookups_wait_for_no_chunk(bench, scripted):
    tier = await bench.open(scripted.url(read_timeout="20s"), connections=1)
    scripted.answers_puts.clear()
    store = asyncio.create_task(bench.put(tier, KEYS[0]))
    while not any("if-none-match" in request.headers for request in scripted.requests):
        await asyncio.sleep(0)
    # The store occupies the only connection for chunks, but lookups have their own connections.
    assert await bench.has(tier, *KEYS) == [True] * 20
    assert not store.done()
    scripted.answers_puts.set()
    assert await store == [None]
