import time

import pytest

from kvtier_sdk import StoredNamespace

KEYS = [index.to_bytes(20, "big") for index in range(20)]
ODD_KEYS = [b"", b"/../", b"a b+c%20", b"\r\n", bytes(range(64)), b"manifest"]


@pytest.mark.parametrize("inner", ["", "/a b/ü+%"])
async def test_keys_and_prefixes_of_any_kind(bench, inner):
    bench.prefix += inner
    tier = await bench.open(bench.server.tier_url("kv", prefix=bench.prefix))
    assert await bench.put(tier, *ODD_KEYS) == [None] * len(ODD_KEYS)
    assert await bench.loads(tier, *ODD_KEYS)
    entries = [entry async for entry in tier.scan()]
    assert sorted((entry.key, entry.object_bytes) for entry in entries) == [
        (key, bench.object_bytes) for key in sorted(ODD_KEYS)
    ]
    assert all(abs(entry.used_s - time.time()) < 3600 for entry in entries)
    assert await bench.stored(bench.name(ODD_KEYS[1])) == bench.content(ODD_KEYS[1])
    await tier.delete(ODD_KEYS)
    assert await bench.has(tier, *ODD_KEYS) == [False] * len(ODD_KEYS)


async def test_prefixes_are_apart(bench):
    tier = await bench.open(bench.url)
    await bench.put(tier, KEYS[0])
    stranger = await bench.open(bench.server.tier_url(f"kv/{bench.prefix}-other"))
    assert await bench.has(stranger, KEYS[0]) == [False]
    assert [entry async for entry in stranger.scan()] == []
    assert [entry.key async for entry in tier.scan()] == KEYS[:1]


async def test_an_emptied_bucket_gets_the_manifest_with_the_next_chunks(bench, monkeypatch):
    monkeypatch.setattr("kvtier_s3.tier._MANIFEST_INTERVAL_S", 0.0)
    tier = await bench.open(bench.url)
    await bench.put(tier, KEYS[0])
    name = f"{bench.prefix}/{bench.namespace.fingerprint}/manifest.json"
    written = await bench.stored(name)
    async with bench.client() as client:
        await client.delete_object(Bucket="kv", Key=name)
    # Store one chunk, because several could write the manifest at once, and rclone may lose it.
    assert await bench.put(tier, KEYS[1]) == [None]
    assert await bench.stored(name) == written


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        (None, "no manifest"),
        (b"", "unreadable manifest"),
        (b'{"facts": {}}', "unverified manifest"),
        (b" " * StoredNamespace.MOST_BYTES + b"{}", "unreadable manifest"),
    ],
)
async def test_a_manifest_is_read_for_what_it_is(bench, manifest, fault):
    tier = await bench.open(bench.url, connections=1)
    name = f"{bench.prefix}/{bench.namespace.fingerprint}/manifest.json"
    assert [found.fault async for found in tier.namespaces()] == [""]
    async with bench.client() as client:
        if manifest is None:
            await client.delete_object(Bucket="kv", Key=name)
        else:
            await client.put_object(Bucket="kv", Key=name, Body=manifest)
    assert [found.fault async for found in tier.namespaces()] == [fault]


async def test_what_is_no_chunk_is_not_listed(bench):
    tier = await bench.open(bench.url)
    await bench.put(tier, KEYS[0])
    namespace = f"{bench.prefix}/{bench.namespace.fingerprint}"
    shard, _, _ = bench.name(b"\xab").rpartition("/")
    strangers = [f"{shard}/{name}" for name in ("notes.txt", "abc.kv", "AB.kv", "more/ab.kv")]
    # These objects are named like chunks, but are not in a shard of the namespace.
    strangers += [f"{namespace}/ab.kv", f"{namespace}/xy/ab.kv"]
    async with bench.client() as client:
        for name in strangers:
            await client.put_object(Bucket="kv", Key=name, Body=b"x")
    assert [entry.key async for entry in tier.scan()] == KEYS[:1]


async def test_more_chunks_than_fit_a_page(bench):
    bench.chunk_bytes = 8
    tier = await bench.open(bench.url)
    keys = [b"%d" % index for index in range(1100)]
    await bench.put(tier, *keys)
    assert sorted([entry.key async for entry in tier.scan()]) == sorted(keys)
    await tier.delete(keys[50:])
    assert sorted([entry.key async for entry in tier.scan()]) == sorted(keys[:50])
