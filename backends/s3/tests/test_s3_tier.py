"""Chunks in and out of a bucket: content, verdicts, foreign objects, listing, deletion."""

from __future__ import annotations

import json
import time

import pytest
from support.guarded import GuardedBuffers

from kvtier_sdk import ChunkNotFoundError, CorruptChunkError, Transfer

KEYS = [index.to_bytes(20, "big") for index in range(20)]
#: Keys of any bytes.
ODD_KEYS = [b"", b"/../", b"a b+c%20", b"\r\n", bytes(range(64)), b"manifest"]


@pytest.mark.parametrize("chunk_bytes", [1, 4096, 100_000, 2**22 + 1])
async def test_what_is_stored_comes_back(bench, chunk_bytes):
    bench.chunk_bytes = chunk_bytes
    tier = await bench.open(bench.url)
    assert await bench.has(tier, *KEYS) == [False] * 20
    assert await bench.put(tier, *KEYS[:10]) == [None] * 10
    assert await bench.has(tier, *KEYS) == [True] * 10 + [False] * 10
    assert await bench.loads(tier, *reversed(KEYS[:10]))
    assert await bench.stored(bench.name(KEYS[0])) == bench.content(KEYS[0])


async def test_a_header_of_a_page(bench):
    bench.header_bytes = 4096
    tier = await bench.open(bench.url)
    assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    assert await bench.loads(tier, *KEYS[:3])


async def test_empty_batches(bench):
    tier = await bench.open(bench.url)
    assert list(await tier.store([])) == list(await tier.load([])) == []
    assert await bench.has(tier) == []
    await tier.delete([])


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


async def test_missing_chunk_fails_alone(bench):
    tier = await bench.open(bench.url)
    await bench.put(tier, KEYS[0], KEYS[2])
    batch = [bench.empty(key) for key in KEYS[:3]]
    first, second, third = await tier.load(batch)
    assert (first, third) == (None, None)
    assert type(second) is ChunkNotFoundError
    assert bench.holds(batch[0])
    assert bench.holds(batch[2])


async def test_a_verdict_does_not_hold_on_to_the_buffers(bench):
    tier = await bench.open(bench.url)
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert (verdict.__traceback__, verdict.__context__, verdict.__cause__) == (None, None, None)


@pytest.mark.parametrize("length_bytes", [0, 1, 99_000, 100_063, 100_065, 400_000])
async def test_an_object_of_another_length_is_corrupt_and_overruns_nothing(bench, length_bytes):
    tier = await bench.open(bench.url, connections=1)
    await bench.put(tier, KEYS[0])
    await bench.overwrite(KEYS[1], b"x" * length_bytes)
    memory = GuardedBuffers(bench.header_bytes, bench.payload_bytes)
    target = Transfer(KEYS[1], bench.request, *memory.buffers)
    (verdict,) = await tier.load([target])
    assert type(verdict) is CorruptChunkError
    assert str(verdict) == f"{length_bytes} bytes stored; expected {bench.object_bytes}"
    assert memory.is_guarded()
    # The tier goes on as before, and a deleted chunk can be stored again.
    assert await bench.loads(tier, KEYS[0])
    await tier.delete([KEYS[1]])
    assert await bench.put(tier, KEYS[1]) == [None]
    assert await bench.loads(tier, KEYS[1])


async def test_namespaces_and_prefixes_are_apart(bench):
    tier = await bench.open(bench.url)
    await bench.put(tier, KEYS[0])
    elsewhere = await bench.open(bench.server.tier_url(f"kv/{bench.prefix}-other"))
    bench.facts["dtype"] = "fp8"
    other = await bench.open(bench.url)
    for stranger in (elsewhere, other):
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
    assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    assert await bench.stored(name) == written


async def test_the_manifest_says_what_the_namespace_stands_for(bench):
    await bench.open(bench.url)
    text = await bench.stored(f"{bench.prefix}/{bench.namespace.fingerprint}/manifest.json")
    assert json.loads(text) == {
        "fingerprint": bench.namespace.fingerprint,
        "facts": bench.namespace.manifest,
    }


async def test_what_is_no_chunk_is_not_listed(bench):
    tier = await bench.open(bench.url)
    await bench.put(tier, KEYS[0])
    namespace = f"{bench.prefix}/{bench.namespace.fingerprint}"
    shard, _, _ = bench.name(b"\xab").rpartition("/")
    strangers = [f"{shard}/{name}" for name in ("notes.txt", "abc.kv", "AB.kv", "more/ab.kv")]
    # A chunk's name, but not in its shard.
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


@pytest.mark.parametrize("conditional", ["yes", "no"])
async def test_storing_twice_is_harmless(bench, conditional):
    tier = await bench.open(bench.url_of(conditional_put=conditional))
    assert await tier.store([bench.full(KEYS[0], seed) for seed in (1, 2)]) == [None, None]
    assert await tier.store([bench.full(KEYS[0], 3)]) == [None]
    target = bench.empty(KEYS[0])
    assert await tier.load([target]) == [None]
    assert sum(bench.holds(target, seed) for seed in (1, 2, 3)) == 1
    if conditional == "no":
        assert bench.holds(target, 3)


async def test_what_was_stored_is_there_after_a_restart_of_the_client(bench):
    await bench.put(await bench.open(bench.url), *KEYS)
    await bench.close()
    assert await bench.loads(await bench.open(bench.url), *KEYS)
