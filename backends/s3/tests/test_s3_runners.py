import asyncio

import pytest
from support.live import CHUNK_BYTES, live
from support.runners import RUNNERS
from support.s3_front import S3Front

from kvtier_sdk import make_offload_key
from kvtier_sdk.engine import ResetScope

KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(40)]


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
            for number in range(3):  # without a store the chunk stays damaged
                request = engine.begin(f"round {number}")
                assert engine.settle(request, *KEYS[:2]) == ["MISS", "HIT"]
                engine.manager.reset_cache(ResetScope.PRIMARY)
            assert engine.manager.stats[1].failures["load.corrupt"] == 3
            engine.store(request, *KEYS[:2])
            engine.manager.reset_cache(ResetScope.PRIMARY)
            assert engine.settle(request, *KEYS[:2]) == ["HIT", "HIT"]
            engine.load(request, *KEYS[:2])
