import asyncio
import os
import subprocess
import sys
import time

import pytest

from kvtier_sdk import ConfigError

KEYS = [index.to_bytes(20, "big") for index in range(20)]
OFTEN = "100ms"

# A program that opens the tier, prints a line, and sweeps until the test kills the process.
OWNER = """
import asyncio, sys
from support.workbench import Workbench

async def main():
    await Workbench().open(sys.argv[1])
    print("open", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def age(bench, seconds, *keys):
    for key in keys:
        path = bench.server.buckets / "kv" / bench.name(key)
        then_s = path.stat().st_mtime - seconds
        os.utime(path, (then_s, then_s))


def signatures(bench):
    directory = bench.server.buckets / "kv" / bench.prefix / "sweepers"
    return sorted(os.listdir(directory)) if directory.exists() else []


async def wait_until(condition):
    end_s = time.monotonic() + 20
    while not await condition():
        assert time.monotonic() < end_s
        await asyncio.sleep(0.05)


async def are(bench, tier, *expected):
    return await bench.has(tier, *KEYS[: len(expected)]) == list(expected)


async def reported(bench, *keys):
    await wait_until(lambda: asyncio.sleep(0, bench.removed == list(keys)))


@pytest.fixture
async def filled(bench):
    tier = await bench.open(bench.url)
    await bench.put(tier, *KEYS[:6])
    for index, key in enumerate(KEYS[:6]):
        age(bench, 1000 - 100 * index, key)
    return tier


async def test_the_oldest_are_deleted_until_the_rest_fits(bench, filled):
    await bench.open(bench.url, capacity=4 * bench.object_bytes, sweep_interval=OFTEN)
    await wait_until(lambda: are(bench, filled, False, False, True, True, True, True))
    await reported(bench, *KEYS[:2])
    await bench.put(filled, KEYS[6])
    await wait_until(lambda: are(bench, filled, False, False, False, True, True, True, True))
    await reported(bench, *KEYS[:3])


async def test_a_short_object_counts_its_own_length(bench, filled):
    whole = bench.full(KEYS[6])
    short = whole.compressed(whole.payload[:1_000])
    await filled.store([short])
    capacity = 5 * bench.object_bytes + short.object_bytes
    await bench.open(bench.url, capacity=capacity, sweep_interval=OFTEN)
    await wait_until(lambda: are(bench, filled, False, True, True, True, True, True, True))
    await reported(bench, KEYS[0])


async def test_chunks_expire_by_the_time_of_their_store(bench, filled):
    await bench.open(bench.url, max_age="750s", sweep_interval=OFTEN)
    await wait_until(lambda: are(bench, filled, False, False, False, True, True, True))
    await reported(bench, *KEYS[:3])


async def test_all_namespaces_count_and_only_chunks_are_deleted(bench, filled):
    facts, bench.facts = bench.facts, {"model": "other"}
    bench.server.make_shards(f"kv/{bench.prefix}/{bench.namespace.fingerprint}")
    await bench.open(bench.url, capacity=2 * bench.object_bytes, sweep_interval=OFTEN)
    bench.facts = facts
    await wait_until(lambda: are(bench, filled, *[False] * 4, True, True))
    # The swept chunks belong to another namespace, so the open tier does not report them.
    assert bench.removed == []
    manifest = f"{bench.prefix}/{bench.namespace.fingerprint}/manifest.json"
    assert await bench.stored(manifest)


async def test_one_of_two_processes_sweeps_and_the_other_succeeds_it(bench, filled):
    url = bench.url_of(capacity=5 * bench.object_bytes, sweep_interval=OFTEN)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, url],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    )
    try:
        await asyncio.to_thread(owner.stdout.readline)
        await wait_until(lambda: are(bench, filled, False, True, True, True, True, True))
        await bench.open(url)
        await wait_until(lambda: asyncio.sleep(0, len(signatures(bench)) == 2))
        # While both processes run, only the older process sweeps, so this tier removed nothing.
        await bench.put(filled, KEYS[6])
        await wait_until(lambda: are(bench, filled, False, False, True, True, True, True, True))
        assert bench.removed == []
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    await wait_until(lambda: asyncio.sleep(0, len(signatures(bench)) == 1))
    await bench.put(filled, KEYS[7])
    expected = [False] * 3 + [True] * 5
    await wait_until(lambda: are(bench, filled, *expected))
    await reported(bench, KEYS[2])


async def test_a_tier_that_is_closed_signs_off(bench):
    tier = await bench.open(bench.url, max_age="1h", sweep_interval=OFTEN)
    await wait_until(lambda: asyncio.sleep(0, len(signatures(bench)) == 1))
    await tier.close()
    assert signatures(bench) == []


async def test_a_sweep_that_fails_is_told_and_tried_again(bench, filled, caplog):
    await bench.open(bench.url, max_age="850s", sweep_interval=OFTEN)
    await wait_until(lambda: are(bench, filled, False, False, True, True, True, True))
    bench.server.kill()
    await wait_until(lambda: asyncio.sleep(0, "capacity and max_age were not kept" in caplog.text))
    age(bench, 500, KEYS[2])
    bench.server.start()
    await wait_until(lambda: are(bench, filled, False, False, False, True, True, True))


async def test_a_capacity_below_one_chunk_is_refused(bench):
    with pytest.raises(ConfigError, match="is below one chunk"):
        await bench.open(bench.url, capacity=bench.object_bytes - 1)


async def test_deleted_chunks_are_reported(bench, filled):
    await filled.delete(KEYS[:2])
    assert bench.removed == KEYS[:2]
