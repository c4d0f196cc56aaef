import pytest

from kvtier_sdk import (
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    Entry,
    TierAuthError,
    TierCapacityError,
)

KEYS = [index.to_bytes(20, "big") for index in range(20)]
ODD_KEYS = [b"", b"{a}b", b"}{", b"*?[a-z]\\", b"\r\n$5\r\n", bytes(range(256)), b"manifest"]


async def test_keys_of_any_bytes(bench, server):
    tier = await bench.open(server.url, prefix="odd*[x]")
    assert await bench.put(tier, *ODD_KEYS) == [None] * len(ODD_KEYS)
    assert await bench.loads(tier, *ODD_KEYS)
    entries = [entry async for entry in tier.scan()]
    assert sorted(entries, key=lambda entry: entry.key) == [
        Entry(key, bench.object_bytes) for key in sorted(ODD_KEYS)
    ]
    await tier.delete(ODD_KEYS)
    assert await bench.has(tier, *ODD_KEYS) == [False] * len(ODD_KEYS)


async def test_a_value_of_another_type_is_corrupt(bench, server):
    tier = await bench.open(server.url)
    server.ask("LPUSH", bench.name(KEYS[0]), b"x")
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, CorruptChunkError)
    await tier.delete(KEYS[:1])
    assert await bench.has(tier, KEYS[0]) == [False]


async def test_a_server_that_was_emptied_gets_the_manifest_with_the_next_chunks(bench, server):
    tier = await bench.open(server.url)
    await bench.put(tier, KEYS[0])
    written = server.ask("GET", f"kvtier{{}}{bench.namespace.fingerprint}.manifest")
    server.ask("FLUSHALL")
    assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    assert server.ask("GET", f"kvtier{{}}{bench.namespace.fingerprint}.manifest") == written


async def test_a_scan_of_many_names_each_once(bench, server):
    bench.chunk_bytes = 8
    tier = await bench.open(server.url)
    keys = [b"%d" % index for index in range(1700)]
    await bench.put(tier, *keys)
    assert sorted([entry.key async for entry in tier.scan()]) == sorted(keys)


async def test_a_scan_passes_over_what_is_no_chunk(bench, server):
    tier = await bench.open(server.url)
    await bench.put(tier, KEYS[0])
    server.ask("LPUSH", bench.name(KEYS[1]), b"x")
    assert [entry.key async for entry in tier.scan()] == KEYS[:1]


async def test_a_ttl_is_set_by_a_store_and_renewed_by_a_touch(bench, server):
    tier = await bench.open(server.url, ttl="1h")
    await bench.put(tier, *KEYS[:2])
    server.ask("PEXPIRE", bench.name(KEYS[0]), 60_000)
    await tier.touch([KEYS[0], KEYS[5]])
    for key in KEYS[:2]:
        assert 3_500_000 < server.ask("PTTL", bench.name(key)) <= 3_600_000
    assert await bench.has(tier, KEYS[5]) == [False]


def life_s(server, name) -> int:
    return round(server.ask("PTTL", name) / 1000)


async def test_a_maximum_age_is_set_by_a_store_and_a_touch_leaves_it(bench, server):
    tier = await bench.open(server.url, max_age="2h")
    await bench.put(tier, KEYS[0])
    server.ask("PEXPIRE", bench.name(KEYS[0]), 60_000)
    await tier.touch(KEYS[:2])
    assert life_s(server, bench.name(KEYS[0])) == 60
    assert server.ask("INFO", "commandstats")["cmdstat_touch"]["calls"] == 2
    await bench.put(tier, KEYS[0])
    assert life_s(server, bench.name(KEYS[0])) == 7200
    assert server.ask("DBSIZE") == 2  # the chunk and the manifest


async def test_no_touch_makes_a_chunk_outlive_its_maximum_age(bench, server):
    storing, touching = [await bench.open(server.url, ttl="20m", max_age="2h") for _ in range(2)]
    await bench.put(storing, *KEYS[:2])
    names, marks = map(bench.name, KEYS[:2]), [bench.young(key) for key in KEYS[:2]]
    first, second = names
    # A mark expires after 100 minutes (6000 s). Without a mark, a use no longer extends the chunk's
    # expiry (20 minutes), so the chunk expires within two hours.
    assert [life_s(server, mark) for mark in marks] == [6000, 6000]
    assert life_s(server, first) == 1200
    server.ask("DEL", marks[1])
    for name in (first, second):
        server.ask("PEXPIRE", name, 60_000)
    await touching.touch(KEYS[:3])
    assert [life_s(server, name) for name in (first, second)] == [1200, 60]
    # A store restarts the expiry of the chunk and of its mark.
    await bench.put(touching, KEYS[1])
    await storing.touch([KEYS[1]])
    assert [life_s(server, name) for name in (second, marks[1])] == [1200, 6000]
    assert sorted([entry.key async for entry in storing.scan()]) == KEYS[:2]
    assert len([one async for one in storing.namespaces()]) == 1


async def test_a_store_that_fails_leaves_a_chunk_as_old_as_it_is(bench, server):
    tier = await bench.open(server.url, ttl="20m", max_age="2h")
    await bench.put(tier, KEYS[0])
    server.ask("PEXPIRE", bench.young(KEYS[0]), 60_000)
    server.ask("ACL", "SETUSER", "default", "resetkeys", "%R~*", "~*.young:*")
    assert isinstance((await bench.put(tier, KEYS[0]))[0], TierAuthError)
    server.ask("ACL", "SETUSER", "default", "~*")
    assert life_s(server, bench.young(KEYS[0])) == 60


async def test_a_maximum_age_as_short_as_the_ttl_needs_no_mark(bench, server):
    tier = await bench.open(server.url, ttl="1h", max_age="1h")
    await bench.put(tier, KEYS[0])
    server.ask("PEXPIRE", bench.name(KEYS[0]), 60_000)
    await tier.touch([KEYS[0]])
    assert life_s(server, bench.name(KEYS[0])) == 60
    assert "cmdstat_exists" not in server.ask("INFO", "commandstats")
    assert server.ask("EXISTS", bench.young(KEYS[0])) == 0


async def test_without_a_ttl_nothing_expires_and_a_touch_counts_as_use(bench, server):
    tier = await bench.open(server.url)
    await bench.put(tier, KEYS[0])
    assert server.ask("PTTL", bench.name(KEYS[0])) == -1
    before = server.ask("INFO", "commandstats")
    await tier.touch(KEYS[:2])
    assert "cmdstat_touch" not in before
    assert server.ask("INFO", "commandstats")["cmdstat_touch"]["calls"] == 2


async def test_what_the_server_evicts_is_a_plain_miss(bench, make_server):
    server = make_server("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru").start()
    tier = await bench.open(server.url)
    keys = [b"%03d" % index for index in range(200)]
    assert await bench.put(tier, *keys) == [None] * 200
    there = await bench.has(tier, *keys)
    assert 0 < sum(there) < 200
    batch = [bench.empty(key) for key in keys]
    for found, transfer, verdict in zip(there, batch, await tier.load(batch), strict=True):
        # Replies need memory too, so the server may evict more chunks during the load.
        if verdict is None:
            assert found
            assert bench.holds(transfer)
        else:
            assert isinstance(verdict, ChunkNotFoundError)


async def test_a_server_that_is_full_and_evicts_nothing(bench, make_server, caplog):
    server = make_server("--maxmemory", "4mb", "--maxmemory-policy", "noeviction").start()
    tier = await bench.open(server.url)
    assert "maxmemory-policy noeviction" in caplog.text
    keys = [b"%03d" % index for index in range(60)]
    verdicts = await bench.put(tier, *keys)
    refused = [verdict for verdict in verdicts if verdict is not None]
    assert 0 < len(refused) < 60
    assert all(isinstance(verdict, TierCapacityError) for verdict in refused)
    assert await bench.has(tier, *keys) == [verdict is None for verdict in verdicts]
    again = await bench.open(server.url)
    assert await bench.loads(again, keys[verdicts.index(None)])


@pytest.mark.parametrize(
    ("maxmemory", "policy", "options", "message"),
    [
        ("0", "noeviction", {}, "the server has no memory limit"),
        ("0", "noeviction", {"ttl": "1h"}, None),
        ("0", "noeviction", {"max_age": "1h"}, None),
        ("64mb", "allkeys-lfu", {}, None),
        ("64mb", "volatile-lru", {}, "evicts no chunk (maxmemory-policy volatile-lru)"),
        ("64mb", "volatile-lru", {"ttl": "1h"}, None),
    ],
)
async def test_limits_are_checked(bench, make_server, caplog, maxmemory, policy, options, message):
    server = make_server("--maxmemory", maxmemory, "--maxmemory-policy", policy).start()
    await bench.open(server.url, **options)
    if message is None:
        assert caplog.text == ""
    else:
        assert message in caplog.text
        assert "set 'maxmemory' and 'maxmemory-policy allkeys-lru'" in caplog.text


async def test_deleted_chunks_are_reported(bench, server):
    tier = await bench.open(server.url)
    await bench.put(tier, *KEYS[:2])
    await tier.delete(KEYS[1:3])
    assert bench.removed == [KEYS[1]]


async def test_usage(bench, make_server):
    server = make_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru").start()
    tier = await bench.open(server.url)
    before = await tier.usage()
    await bench.put(tier, *KEYS[:10])
    after = await tier.usage()
    assert after.chunks - before.chunks == 10
    assert after.used_bytes - before.used_bytes >= 10 * bench.object_bytes
    assert after.capacity_bytes == 64 * 2**20


async def test_a_database_of_its_own(bench, server):
    tier = await bench.open(f"{server.url}/3")
    await bench.put(tier, KEYS[0])
    assert await bench.loads(tier, KEYS[0])
    assert server.ask("EXISTS", bench.name(KEYS[0])) == 0
    assert await bench.has(await bench.open(server.url, db=3), KEYS[0]) == [True]


async def test_a_database_that_is_not_there(bench, server):
    with pytest.raises(ConfigError, match="option 'db'"):
        await bench.open(f"{server.url}/99")
