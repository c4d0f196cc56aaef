"""The tier under a manager, in a thread and in a process: loads, damage, outages."""

from __future__ import annotations

import asyncio

import pytest
from support.live import CHUNK_BYTES, live
from support.runners import RUNNERS
from support.s3_front import S3Front
from support.s3_server import S3Server

from kvtier_sdk import make_offload_key
from kvtier_sdk.engine import ResetScope

KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(40)]


def url_of(server: S3Server, place: str, runner: str) -> str:
    # A short interval, so that a tier behind an open breaker is tried again soon.
    return server.tier_url(f"kv/{place}", runner=runner, probe_interval="50ms")


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_leaves_the_primary_tier_comes_back(server, runner):
    with live([url_of(server, f"back-{runner}", runner)], slots=16) as engine:
        request = engine.begin("first")
        engine.there_and_back(request, *KEYS)
        engine.manager.on_request_finished(request)
        assert engine.manager.stats[1].loaded_chunks >= 24
        assert engine.manager.stats[1].failures == {}
        assert set(engine.manager.left_over().values()) == {0}


@pytest.mark.parametrize("runner", RUNNERS)
def test_damaged_and_misplaced_objects_are_misses_and_make_room_for_better_ones(
    server, bench, runner
):
    url = url_of(server, f"damaged-{runner}", runner)
    bench.prefix = f"damaged-{runner}"
    bench.facts = {"model": "m", "chunk_bytes": CHUNK_BYTES}
    with live([url]) as engine:
        engine.store(engine.begin("first"), *KEYS[:5])

    async def damage() -> None:
        whole, other = await bench.stored(bench.name(KEYS[0])), bench.name(KEYS[4])
        assert len(whole) == 64 + CHUNK_BYTES
        await bench.overwrite(KEYS[0], whole[:-100])  # truncated
        await bench.overwrite(KEYS[1], whole)  # misplaced
        await bench.overwrite(KEYS[2], whole[:-1] + b"?")  # flipped, and misplaced
        await bench.overwrite(KEYS[3], (await bench.stored(other))[:64] + whole[64:])  # another's

    asyncio.run(damage())
    with live([url]) as engine:
        request = engine.begin("second")
        assert engine.settle(request, *KEYS[:5]) == ["MISS"] * 4 + ["HIT"]
        engine.load(request, KEYS[4])
        engine.store(request, *KEYS[:4])
    with live([url]) as engine:
        request = engine.begin("third")
        assert engine.settle(request, *KEYS[:5]) == ["HIT"] * 5
        engine.load(request, *KEYS[:5])


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_damaged_object_that_must_not_be_deleted_is_written_over(server, bench, runner):
    bench.prefix = f"guarded-{runner}"
    bench.facts = {"model": "m", "chunk_bytes": CHUNK_BYTES}
    with S3Front(server.port, guarded=server.buckets) as front:
        options = {"endpoint": front.endpoint, "runner": runner, "probe_interval": "50ms"}
        url = server.tier_url(f"kv/{bench.prefix}", **options)
        with live([url]) as engine:
            engine.store(engine.begin("first"), *KEYS[:2])

        async def damage() -> None:
            whole = await bench.stored(bench.name(KEYS[0]))
            await bench.overwrite(KEYS[0], whole[:-1] + b"?")

        asyncio.run(damage())
        with live([url]) as engine:
            for number in range(3):  # nothing is stored: the damage stays
                request = engine.begin(f"round {number}")
                assert engine.settle(request, *KEYS[:2]) == ["MISS", "HIT"]
                engine.manager.reset_cache(ResetScope.PRIMARY)
            assert engine.manager.stats[1].failures["load.corrupt"] == 3
            engine.store(request, *KEYS[:2])
            engine.manager.reset_cache(ResetScope.PRIMARY)
            assert engine.settle(request, *KEYS[:2]) == ["HIT", "HIT"]
            engine.load(request, *KEYS[:2])


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_server_that_is_killed_and_started_again_costs_its_share_and_nothing_else(
    tmp_path, runner
):
    with S3Server(tmp_path) as server, live([url_of(server, "x", runner)], slots=64) as engine:
        request = engine.begin("first")
        engine.store(request, *KEYS[:8])
        server.kill()
        # Chunks in the primary tier are served; the rest is a miss, not an error.
        assert engine.settle(request, *KEYS[:16]) == ["HIT"] * 8 + ["MISS"] * 8
        engine.store(request, *KEYS[8:16])
        assert engine.settle(request, *KEYS[:16]) == ["HIT"] * 16
        server.start()
        for number in range(2000):
            engine.store(request, make_offload_key(number.to_bytes(8, "big") * 4, 1))
            if engine.manager.stats[1].stored_chunks > 8:
                break
        assert engine.manager.stats[1].stored_chunks > 8
        engine.manager.on_request_finished(request)
        engine.rest()
        assert set(engine.manager.left_over().values()) == {0}
