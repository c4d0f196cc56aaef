import asyncio
import errno
import os
import re
import shutil
import threading
from unittest.mock import ANY

import pytest

from kvtier_file.chunks import earlier_uses
from kvtier_sdk import ChunkNotFoundError, ConfigError, TierCapacityError, Usage

KEYS = [index.to_bytes(20, "big") for index in range(60)]
# The ledger may grow by this many bytes after a store has made room.
LEDGER_BYTES = 2 * 4096


async def test_the_least_recently_used_chunk_is_evicted(bench):
    tier = await bench.open(capacity=4 * bench.object_bytes)
    await bench.put(tier, *KEYS[:4])
    await tier.touch([KEYS[0], KEYS[10]])
    assert await bench.loads(tier, KEYS[1])
    await bench.put(tier, KEYS[2])
    assert await bench.put(tier, KEYS[4]) == [None]
    assert bench.removed == [KEYS[3]]
    assert await bench.put(tier, KEYS[5], KEYS[6]) == [None, None]
    assert bench.removed == [KEYS[3], KEYS[0], KEYS[1]]
    assert await bench.has(tier, *KEYS[:7]) == [False, False, True, False, True, True, True]
    assert await tier.usage() == Usage(4, 4 * bench.object_bytes, 4 * bench.object_bytes, ANY)
    assert bench.stored_bytes() == 4 * bench.object_bytes


async def test_chunks_take_the_room_of_their_own_lengths(bench, in_both_forms):
    # With its header, a full chunk occupies 26 pages, and a chunk of one page occupies 2.
    tier = await bench.open(capacity=2 * bench.object_bytes)
    assert await tier.store([bench.pages(key) for key in KEYS[:26]]) == [None] * 26
    assert bench.removed == []
    assert await tier.store([bench.pages(KEYS[26])]) == [None]
    assert bench.removed == KEYS[:1]
    assert await bench.put(tier, KEYS[27]) == [None]
    assert bench.removed == KEYS[:14]
    assert await tier.store([bench.pages(key) for key in KEYS[28:41]]) == [None] * 13
    assert bench.removed == KEYS[:27]
    assert await tier.store([bench.pages(KEYS[41])]) == [None]
    assert bench.removed == KEYS[:28]
    usage = await tier.usage()
    assert (usage.chunks, usage.used_bytes) == (14, 14 * 2 * 4096)
    assert bench.stored_bytes() == usage.used_bytes
    assert bench.header().reserved_bytes == 0
    assert bench.temporaries() == []


@pytest.mark.parametrize("restart", [False, True])
async def test_a_chunk_that_was_used_often_is_evicted_later(bench, restart):
    capacity = 4 * bench.object_bytes
    tier = await bench.open(capacity=capacity)
    await bench.put(tier, *KEYS[:4])
    for _ in range(3):
        bench.clock.ahead_s += 10
        assert await bench.loads(tier, KEYS[0])
    if restart:
        await bench.close()
        tier = await bench.open(capacity=capacity)
    for key in KEYS[4:7]:
        bench.clock.ahead_s += 10
        await bench.put(tier, key)
    assert bench.removed == [KEYS[1], KEYS[2], KEYS[3]]
    # KEYS[0] was last used 10 s before KEYS[4]. But KEYS[0] was used four times, so it stays twice
    # as long as KEYS[4], which was used once.
    bench.clock.ahead_s += 10
    await bench.put(tier, KEYS[7])
    assert bench.removed[3:] == [KEYS[4]]


async def test_the_start_of_many_prompts_has_as_many_uses_as_their_ends(bench):
    tier = await bench.open()
    start, end = KEYS[:2]
    await bench.put(tier, end, start)
    for step in range(8):
        bench.clock.ahead_s += 0.5
        await tier.touch([end, start] if step % 4 == 3 else [start])
    uses = {key: earlier_uses(bench.file(key).stat().st_mtime_ns) for key in (start, end)}
    assert uses == {start: 4, end: 2}


async def test_the_age_of_what_was_evicted_last_is_a_gauge(bench):
    tier = await bench.open(capacity=2 * bench.object_bytes)
    await bench.put(tier, KEYS[0])
    bench.clock.ahead_s = 3600
    await bench.put(tier, KEYS[1], KEYS[2])
    assert bench.removed == [KEYS[0]]
    age_s = tier.context.gauge("evicted_age_seconds").value
    assert 3600 <= age_s < 3700


async def test_a_batch_never_evicts_its_own(bench):
    tier = await bench.open(capacity=3 * bench.object_bytes)
    await bench.put(tier, *KEYS[50:53])
    verdicts = await bench.put(tier, *KEYS[:5])
    assert verdicts[:3] == [None] * 3
    assert [type(verdict) for verdict in verdicts[3:]] == [TierCapacityError] * 2
    assert not verdicts[3].retryable
    assert bench.removed == KEYS[50:53]
    assert await bench.loads(tier, *KEYS[:3])


async def test_a_chunk_being_loaded_is_not_evicted(bench, monkeypatch):
    tier = await bench.open(capacity=2 * bench.object_bytes)
    await bench.put(tier, *KEYS[:2])
    entered, leave = threading.Semaphore(0), threading.Event()
    real = os.preadv

    def waiting(*args):
        entered.release()
        assert leave.wait(30)
        return real(*args)

    monkeypatch.setattr(os, "preadv", waiting)
    oldest = bench.empty(KEYS[0])
    load = asyncio.create_task(tier.load([oldest]))
    assert await asyncio.to_thread(entered.acquire, timeout=30)
    assert await bench.put(tier, KEYS[2]) == [None]
    assert bench.removed == [KEYS[1]]
    both = asyncio.create_task(tier.load([bench.empty(KEYS[2])]))
    # The second load pins KEYS[2], so no chunk can be evicted any more.
    assert await asyncio.to_thread(entered.acquire, timeout=30)
    assert isinstance((await bench.put(tier, KEYS[3]))[0], TierCapacityError)
    leave.set()
    assert await load == [None]
    assert bench.holds(oldest)
    assert await both == [None]


async def test_a_lower_capacity_is_met_at_open(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:6])
    await bench.close()
    tier = await bench.open(capacity=2 * bench.object_bytes)
    assert bench.removed == KEYS[:4]
    assert await bench.has(tier, *KEYS[:6]) == [False] * 4 + [True] * 2
    assert bench.stored_bytes() == 2 * bench.object_bytes


async def test_another_namespace_may_be_removed_by_hand(bench):
    await bench.put(await bench.open(), *KEYS[:3])
    await bench.close()
    other = bench.directory
    bench.facts = {"model": "n"}
    tier = await bench.open(capacity=3 * bench.object_bytes)
    other.rename(bench.root.parent / "away")
    assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    assert not other.exists()


async def test_in_place_of_a_chunk_that_cannot_be_evicted_another_goes(bench, spoil):
    tier = await bench.open(capacity=2 * bench.object_bytes)
    await bench.put(tier, *KEYS[:2])
    for call in ("rename", "unlink"):
        spoil(call, errno.EPERM, KEYS[0])
    assert await bench.put(tier, KEYS[2]) == [None]
    assert await bench.has(tier, *KEYS[:3]) == [True, False, True]
    assert bench.stored_bytes() == 2 * bench.object_bytes


async def test_replacing_a_damaged_chunk_keeps_the_count(bench):
    tier = await bench.open(capacity=3 * bench.object_bytes)
    await bench.put(tier, *KEYS[:2])
    os.truncate(bench.file(KEYS[0]), 5)
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await tier.usage() == Usage(2, 2 * bench.object_bytes, 3 * bench.object_bytes, ANY)
    assert await bench.loads(tier, *KEYS[:2])


async def test_min_free_stays_free(small):
    tier = await small.open(min_free="512KiB")
    for key in KEYS[:30]:
        assert await small.put(tier, key) == [None]
        assert free_bytes(small) >= 512 * 1024
    assert small.removed == KEYS[: len(small.removed)]
    assert await small.has(tier, KEYS[29], KEYS[0]) == [True, False]


async def fill(bench, tier):
    for index in range(10**6):
        if bench.removed:
            bench.removed.clear()
            return
        assert await bench.put(tier, b"old%d" % index) == [None]


def free_bytes(bench):
    status = os.statvfs(bench.root)
    return status.f_bavail * status.f_frsize


async def test_concurrent_batches_evict_for_min_free_at_most_their_size_more(small):
    small.chunk_bytes = 3 * 4096
    tier = await small.open(min_free="512KiB")
    await fill(small, tier)
    for start in range(0, 60, 20):
        batches = [KEYS[start + n : start + n + 5] for n in range(0, 20, 5)]
        verdicts = await asyncio.gather(*(small.put(tier, *batch) for batch in batches))
        assert verdicts == [[None] * 5] * 4
        assert free_bytes(small) >= 512 * 1024 - LEDGER_BYTES
    assert len(small.removed) <= 60 + 20


@pytest.mark.parametrize("min_free", ["100%", "1TiB"])
async def test_a_min_free_above_the_file_system_refuses_every_store(small, min_free):
    tier = await small.open()
    await small.put(tier, KEYS[0])
    await small.close()
    tier = await small.open(min_free=min_free)
    (verdict,) = await small.put(tier, KEYS[1])
    assert type(verdict) is TierCapacityError
    assert "min_free" in str(verdict)
    assert small.removed == []
    assert await small.loads(tier, KEYS[0])


async def test_a_chunk_expires_that_is_not_used(bench):
    tier = await bench.open(ttl="1h")
    await bench.put(tier, *KEYS[:4])
    bench.clock.ahead_s = 2000
    assert await bench.loads(tier, KEYS[0])
    await tier.touch([KEYS[1]])
    await bench.put(tier, KEYS[2])
    bench.clock.ahead_s = 4000
    assert bench.removed == []
    assert await bench.has(tier, *KEYS[:4]) == [True, True, True, False]
    assert bench.removed == [KEYS[3]]
    assert bench.stored_bytes() == 3 * bench.object_bytes


async def test_an_expired_chunk_is_neither_loaded_nor_revived(bench):
    tier = await bench.open(ttl="1h")
    await bench.put(tier, *KEYS[:3])
    bench.clock.ahead_s = 4000
    await tier.touch(KEYS[:1])
    assert [entry async for entry in tier.scan()] == []
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, ChunkNotFoundError)
    assert await tier.store([bench.full(KEYS[1], seed=1)]) == [None]
    target = bench.empty(KEYS[1])
    assert await tier.load([target]) == [None]
    assert bench.holds(target, seed=1)


async def test_expired_chunks_of_all_namespaces_make_room_at_a_store_and_at_open(bench):
    await bench.put(await bench.open(ttl="1h"), *KEYS[:3])
    bench.facts["dtype"] = "fp8"
    tier = await bench.open(ttl="1h")
    bench.clock.ahead_s = 4000
    await bench.put(tier, KEYS[5])
    assert bench.stored_bytes() == bench.object_bytes
    await bench.close()
    bench.clock.ahead_s = 8000
    await bench.open(ttl="1h")
    assert bench.stored_bytes() == 0


async def test_a_chunk_that_another_process_uses_does_not_expire(bench):
    first, second = [await bench.open(ttl="1h") for _ in range(2)]
    await bench.put(first, *KEYS[:2])
    bench.clock.ahead_s = 2000
    await second.touch(KEYS[:1])
    bench.clock.ahead_s = 4000
    await bench.put(first, KEYS[5])
    assert await bench.has(first, *KEYS[:2]) == [True, False]
    assert bench.removed == [KEYS[1]]


@pytest.mark.parametrize("restart", [False, True])
async def test_a_file_of_the_future_is_gone_and_keeps_no_other(bench, in_both_forms, restart):
    tier = await bench.open(ttl="1h")
    await bench.put(tier, *KEYS[:5])
    future_ns = int((bench.clock.wall_s() + 86400) * 1e9)
    os.utime(bench.file(KEYS[0]), ns=(future_ns, future_ns))
    if restart:
        await bench.close()
        tier = await bench.open(ttl="1h")
    assert await bench.has(tier, *KEYS[:5]) == [False, True, True, True, True]
    assert bench.stored_bytes() == 4 * bench.object_bytes
    bench.clock.ahead_s = 2000
    await tier.touch([KEYS[1]])
    assert await bench.loads(tier, KEYS[2])
    await bench.put(tier, KEYS[3], KEYS[5])
    bench.clock.ahead_s = 4000
    assert await bench.has(tier, *KEYS[:6]) == [False, True, True, True, False, True]
    bench.clock.ahead_s = 6000
    await bench.put(tier, KEYS[6])
    assert bench.stored_bytes() == bench.object_bytes


async def test_a_use_brings_a_file_of_the_future_back(bench, in_both_forms):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:3])
    future_ns = int((bench.clock.wall_s() + 86400) * 1e9)
    for key in KEYS[:3]:
        os.utime(bench.file(key), ns=(future_ns, future_ns))
    assert await bench.loads(tier, KEYS[0])
    await tier.touch([KEYS[1]])
    await bench.put(tier, KEYS[2])
    latest_ns = int(bench.clock.wall_s() * 1e9)
    assert all(bench.file(key).stat().st_mtime_ns < latest_ns for key in KEYS[:3])


@pytest.mark.parametrize("ttl", [{}, {"ttl": "90m"}])
@pytest.mark.parametrize("restart", [False, True])
async def test_no_use_extends_the_maximum_age(bench, in_both_forms, ttl, restart):
    tier = await bench.open(max_age="2h", **ttl)
    await bench.put(tier, *KEYS[:5])
    for _ in range(3):
        bench.clock.ahead_s += 2000
        await tier.touch([KEYS[0]])
        assert await bench.loads(tier, KEYS[1])
        await bench.put(tier, KEYS[2])
        assert await tier.store([bench.full(KEYS[3], replace=True)]) == [None]
    if restart:
        await bench.close()
        tier = await bench.open(max_age="2h", **ttl)
    bench.clock.ahead_s = 7000
    assert await bench.has(tier, *KEYS[:5]) == [True, True, True, True, not ttl]
    bench.clock.ahead_s = 7300
    (verdict,) = await tier.load([bench.empty(KEYS[1])])
    assert isinstance(verdict, ChunkNotFoundError)
    assert await bench.has(tier, *KEYS[:5]) == [False, False, False, True, False]
    assert bench.stored_bytes() == bench.object_bytes
    assert (sorted(bench.expired), bench.evicted) == (sorted({*KEYS[:3], KEYS[4]}), [])
    # The age of a chunk counts from its last store.
    assert await bench.put(tier, KEYS[0]) == [None]
    bench.clock.ahead_s = 13000
    assert await bench.loads(tier, KEYS[3]) is not bool(ttl)


async def test_a_chunk_in_a_written_over_file_is_as_old_as_its_own_store(bench, in_both_forms):
    options = {"max_age": "1h", "capacity": 2 * bench.object_bytes}
    tier = await bench.open(**options)
    await bench.put(tier, *KEYS[:2])
    bench.clock.ahead_s = 3000
    await bench.put(tier, KEYS[2])
    bench.clock.ahead_s = 6000
    assert await bench.has(tier, *KEYS[:3]) == [False, False, True]


async def test_a_chunk_too_old_goes_with_the_next_store(bench):
    first, second = [await bench.open(max_age="1h") for _ in range(2)]
    await bench.put(first, *KEYS[:2])
    bench.clock.ahead_s = 3000
    assert await bench.loads(second, KEYS[0])
    bench.clock.ahead_s = 4000
    await bench.put(second, KEYS[2])
    assert bench.stored_bytes() == bench.object_bytes
    # The first tier learns from the ledger which chunks have expired.
    assert await bench.put(first, KEYS[3]) == [None]
    assert sorted(bench.expired) == sorted(2 * KEYS[:2])


async def test_a_chunk_of_unknown_age_is_too_old(bench, in_both_forms):
    tier = await bench.open(max_age="1h")
    await bench.put(tier, *KEYS[:3])
    bench.clock.ahead_s = 3000
    bench.file(KEYS[0]).read_bytes()
    os.utime(bench.file(KEYS[1]))
    assert await bench.has(tier, *KEYS[:3]) == [False, False, True]


async def test_a_file_system_with_coarse_times_has_no_maximum_age(bench, monkeypatch):
    real = os.utime

    def coarse(path, *, ns, **more):
        real(path, ns=tuple(time_ns // 10**9 * 10**9 for time_ns in ns), **more)

    monkeypatch.setattr(os, "utime", coarse)
    with pytest.raises(ConfigError, match="to the nanosecond, which max_age needs"):
        await bench.open(max_age="1h")
    await bench.put(await bench.open(ttl="1h"), KEYS[0])


async def test_a_capacity_that_no_file_system_has_is_refused(small):
    with pytest.raises(ConfigError, match=r"200 GiB is more than .* 2 MiB; write at") as refused:
        await small.open(capacity="200GiB", min_free="50%")
    suggested = str(refused.value).split("'")[-2]
    tier = await small.open(capacity=suggested, min_free="50%")
    usage = await tier.usage()
    assert usage == Usage(0, 0, 2**20, shutil.disk_usage(small.root).free)


async def test_a_file_system_that_runs_short_is_said_once(small, caplog):
    tier = await small.open(min_free="50%")
    for key in KEYS:
        await small.put(tier, key)
        if key == KEYS[0]:
            (small.root.parent / "another's").write_bytes(bytes(1_200_000))
    (message,) = caplog.messages
    assert "min_free keeps 1 MiB: chunks are evicted" in message


@pytest.mark.parametrize("pages", [1, 25])
async def test_a_quota_is_met_by_eviction_and_said_once(bench, monkeypatch, caplog, pages):
    real, quota_bytes = os.pwritev, 4 * (1 + pages) * 4096

    def limited(fd, buffers, offset):
        stored = sum(found.stat().st_size for found in bench.root.glob("*/*/*.*"))
        if stored + sum(map(len, buffers)) > quota_bytes:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", limited)
    tier = await bench.open()
    for key in KEYS[:10]:
        assert await tier.store([bench.pages(key, pages)]) == [None]
    assert bench.removed == bench.evicted == KEYS[:6]
    assert await tier.load([bench.empty(key) for key in KEYS[6:10]]) == [None] * 4
    (message,) = caplog.messages
    assert re.search(r"refused a write with \S+ \S+ free \(Disk quota exceeded\)", message)
    # A refusal more than ten minutes after the last refusal is logged again.
    bench.clock.ahead_s = 700
    await tier.store([bench.pages(KEYS[10], pages)])
    assert len(caplog.messages) == 2


async def test_a_root_that_is_made_again_is_said_once(bench, caplog):
    tier = await bench.open()
    shutil.rmtree(bench.root)
    for key in KEYS[:3]:
        assert await bench.put(tier, key) == [None]
    (message,) = caplog.messages
    assert "was removed, and its chunks with it" in message
