"""Several tiers in one process share a root; ``test_file_processes.py`` has real processes."""

import asyncio
import errno
import fcntl
import os
import shutil
import threading
from contextlib import contextmanager
from unittest.mock import ANY

import pytest

from kvtier_file import usage_replica
from kvtier_file.namespace import NamespaceDirectory
from kvtier_file.root import Root
from kvtier_file.shared_files import Leases
from kvtier_file.store import ChunkStore
from kvtier_sdk import ChunkNotFoundError, TierCapacityError, TierError, Usage

KEYS = [index.to_bytes(20, "big") for index in range(60)]


@pytest.fixture
async def pair(make_bench):
    """Return two workbenches on one root. Each records the removals that its tier reports."""
    return make_bench(), make_bench()


@contextmanager
def header_file(bench):
    fd = os.open(bench.root / ".shared" / "header", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


async def open_both(pair, capacity_chunks=None):
    one, other = pair
    options = {} if capacity_chunks is None else {"capacity": capacity_chunks * one.object_bytes}
    return one, await one.open(**options), other, await other.open(**options)


async def use_chunk(how, bench, tier, key):
    if how == "touch":
        await tier.touch([key])
    elif how == "load":
        assert await bench.loads(tier, key)
    else:
        assert await bench.put(tier, key) == [None]


def no_locks(fd, operation):
    raise OSError(errno.ENOLCK, "no locks")


def assert_clean(bench):
    header = bench.header()
    assert header.clean
    files = list(bench.root.glob("*/??/*.kv"))
    assert (header.chunks, header.used_bytes) == (len(files), bench.stored_bytes())
    assert header.reserved_bytes == 0


@pytest.mark.parametrize("use", ["load", "touch", "store"])
async def test_a_chunk_that_another_used_stays(pair, use):
    one, first, other, second = await open_both(pair, 3)
    await other.put(second, *KEYS[:3])
    await use_chunk(use, one, first, KEYS[0])
    await other.put(second, KEYS[3])
    assert await other.has(second, *KEYS[:4]) == [True, False, True, True]
    await other.put(second, KEYS[4])
    assert await other.has(second, *KEYS[:5]) == [True, False, False, True, True]


@pytest.mark.parametrize("ahead_s", [5, -5])
async def test_chunks_of_a_process_with_another_clock_are_evicted_in_turn(pair, ahead_s):
    pair[0].clock.ahead_s = ahead_s
    one, first, other, second = await open_both(pair, 4)
    for index in range(0, 40, 4):
        await one.put(first, KEYS[index])
        await other.put(second, *KEYS[index + 1 : index + 3])
        assert await one.loads(first, KEYS[index + 1])
        await one.put(first, KEYS[index + 3])
    # Only the chunks of the loop's last pass are left.
    assert await other.has(second, *KEYS[:40]) == [False] * 36 + [True] * 4
    assert await one.loads(first, KEYS[36])
    await other.put(second, KEYS[40], KEYS[41])
    assert await other.has(second, *KEYS[36:42]) == [True, False, False, True, True, True]


async def test_a_clock_far_ahead_elsewhere_costs_only_what_was_used_by_it(pair):
    one, first, other, second = await open_both(pair, 4)
    await other.put(second, *KEYS[:4])
    one.clock.ahead_s = 86400
    assert await one.loads(first, KEYS[0])
    await one.put(first, KEYS[4])
    await other.put(second, KEYS[5])
    assert await other.has(second, *KEYS[:6]) == [True, False, True, True, False, True]
    await other.put(second, KEYS[6], KEYS[7])
    assert await other.has(second, *KEYS[:8]) == [False] * 3 + [True, False, True, True, True]


@pytest.mark.parametrize("use", ["load", "touch"])
async def test_a_use_by_a_slow_clock_makes_no_chunk_older(pair, use):
    pair[0].clock.ahead_s = -5
    one, first, other, second = await open_both(pair)
    await other.put(second, *KEYS[:4])
    await use_chunk(use, one, first, KEYS[1])
    await one.close()
    await other.close()
    second = await other.open(capacity=4 * other.object_bytes)
    await other.put(second, KEYS[4])
    assert other.removed == [KEYS[0]]


async def test_each_reports_all_removals_once(pair):
    one, first, other, second = await open_both(pair, 2)
    await one.put(first, *KEYS[:2])
    await other.put(second, *KEYS[2:4])
    assert other.removed == other.evicted == KEYS[:2]
    assert one.removed == []
    # The lookup finds no file for a counted chunk, so the tier reads the ledger under the lock.
    assert await one.has(first, KEYS[0]) == [False]
    assert one.removed == KEYS[:2]
    await second.delete([KEYS[2]])
    await first.usage()
    assert one.removed == other.removed == KEYS[:3]
    assert one.evicted == other.evicted == KEYS[:2]
    await one.put(first, KEYS[0])
    await second.usage()
    assert one.removed == other.removed == KEYS[:3]


async def test_case_15_one_key_stored_twice_at_once(pair, monkeypatch):
    one, first, other, second = await open_both(pair)
    both = threading.Barrier(2)
    real = os.pwritev

    def together(*args):
        written = real(*args)
        both.wait(30)
        return written

    monkeypatch.setattr(os, "pwritev", together)
    verdicts = await asyncio.gather(one.put(first, KEYS[0]), other.put(second, KEYS[0]))
    assert verdicts == [[None], [None]]
    assert await first.usage() == Usage(1, one.object_bytes, None, ANY)
    assert await one.loads(first, KEYS[0])
    assert await other.loads(second, KEYS[0])
    assert_clean(one)


async def test_open_namespaces_compete_by_recency_and_others_go_first(make_bench):
    pair = make_bench(), make_bench()
    pair[1].facts = {"model": "other"}
    one, first, other, second = await open_both(pair, 4)
    await one.put(first, *KEYS[:2])
    await other.put(second, *KEYS[:2])
    await one.put(first, KEYS[2])
    assert await one.has(first, *KEYS[:3]) == [False, True, True]
    await one.close()
    # No process has the first namespace open any more, so its chunks are evicted first, although
    # the most recently used chunk of the root is one of them.
    await other.put(second, KEYS[2])
    assert await other.has(second, *KEYS[:3]) == [True] * 3


async def test_lookups_and_loads_need_no_lock(pair):
    one, _ = pair
    tier = await one.open()
    await one.put(tier, KEYS[0])
    with header_file(one) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert await one.has(tier, *KEYS[:2]) == [True, False]
        assert await one.loads(tier, KEYS[0])
        await tier.touch([KEYS[0]])
        store = asyncio.create_task(one.put(tier, KEYS[1]))
        done, _ = await asyncio.wait([store], timeout=0.05)
        assert not done
    assert await store == [None]


@pytest.mark.parametrize(("capacity_chunks", "expected"), [(640, 2), (320, 4), (12, 20)])
async def test_a_batch_locks_twice_and_writes_unlocked(
    bench, monkeypatch, capacity_chunks, expected
):
    tier = await bench.open(capacity=capacity_chunks * bench.object_bytes)
    await bench.put(tier, *KEYS[40:50])
    taken = []
    real_flock, real_pwritev = fcntl.flock, os.pwritev

    def counting(fd, operation):
        taken.append(operation)
        real_flock(fd, operation)

    def unlocked(*args):
        with header_file(bench) as fd:
            real_flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return real_pwritev(*args)

    monkeypatch.setattr(fcntl, "flock", counting)
    monkeypatch.setattr(os, "pwritev", unlocked)
    assert await bench.put(tier, *KEYS[10:20]) == [None] * 10
    assert taken.count(fcntl.LOCK_EX) == expected


async def test_the_second_process_does_not_scan(pair, monkeypatch):
    one, other = pair
    first = await one.open()
    await one.put(first, *KEYS[:5])
    monkeypatch.setattr(Root, "scan", lambda *args: pytest.fail("recounted"))
    second = await other.open()
    assert (await second.usage()).chunks == 5
    await one.put(first, *KEYS[5:10])
    assert (await second.usage()).chunks == 10


async def test_a_choice_of_victims_asks_one_other_process_whether_it_lives(make_bench, monkeypatch):
    benches = [make_bench() for _ in range(6)]
    tiers = [await one.open(capacity=4 * one.object_bytes) for one in benches]
    await benches[0].put(tiers[0], *KEYS[:4])
    asked = []
    is_held = Leases.is_held
    monkeypatch.setattr(
        Leases, "is_held", lambda self, name: asked.append(name) or is_held(self, name)
    )
    for key in KEYS[4:9]:
        assert await benches[0].put(tiers[0], key) == [None]
    # Each store checks the lease of one process, a different process each time.
    assert len(asked) == len(set(asked)) == 5


async def test_a_compacted_ledger_is_followed(pair, monkeypatch):
    monkeypatch.setattr(usage_replica, "_MIN_COMPACTION_BYTES", 1000)
    monkeypatch.setattr(usage_replica, "_COMPACTION_GROWTH", 2)
    one, first, other, second = await open_both(pair, 4)
    monkeypatch.setattr(Root, "scan", lambda *args: pytest.fail("recounted"))
    ledger = one.root / ".shared" / "ledger"
    await other.put(second, b"old")
    generations, lengths = set(), []
    for key in KEYS:
        await one.put(first, key)
        generations.add(one.header().generation)
        lengths.append(ledger.stat().st_size)
        assert_clean(one)
    assert len(generations) > 3
    assert max(lengths) < 2000
    await other.put(second, KEYS[0])
    # The second tier missed whole generations of the ledger. So it cannot report the removal of
    # chunks that were stored and removed in between.
    assert other.removed == [b"old", KEYS[56]]
    assert (await second.usage()).chunks == 4
    await one.put(first, *KEYS[1:5])
    await other.put(second, *KEYS[5:9])
    assert set(KEYS[57:]) <= set(other.removed)
    assert_clean(one)


@pytest.mark.parametrize(
    "damage", ["zeros", "short", "checksum", "short ledger", "zeros in ledger", "other ledger"]
)
async def test_damaged_shared_files_cause_a_recount(pair, damage):
    one, first, other, second = await open_both(pair)
    await one.put(first, *KEYS[:5])
    with header_file(one) as fd:
        if damage == "zeros":
            os.pwrite(fd, bytes(4096), 0)
        elif damage == "short":
            os.truncate(fd, 7)
        elif damage == "checksum":
            os.pwrite(fd, b"\xff", 30)
        else:
            ledger = one.root / ".shared" / "ledger"
            record = ledger.read_bytes()[: ledger.stat().st_size // 5]
            os.truncate(ledger, 3)
            if damage == "zeros in ledger":
                os.truncate(ledger, 10_000)
            elif damage == "other ledger":
                ledger.write_bytes(5 * record)
            await other.close()
            second = await other.open()
    assert (await second.usage()).chunks == 5
    await other.put(second, *KEYS[5:7])
    assert (await first.usage()).chunks == 7
    assert other.removed == one.removed == []
    assert_clean(one)


@pytest.mark.parametrize("lost", ["", "header", "ledger", "leases"])
async def test_shared_files_removed_by_hand_are_made_and_joined_again(pair, lost):
    one, first, other, second = await open_both(pair, 4)
    capacity = 4 * one.object_bytes
    await one.put(first, *KEYS[:2])
    path = one.root / ".shared" / lost
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    await one.put(first, *KEYS[2:5])
    await other.put(second, *KEYS[5:8])
    assert one.stored_bytes() == capacity
    for tier in (first, second):
        assert await tier.usage() == Usage(4, capacity, capacity, ANY)
    assert len(one.header().reservations) == len(os.listdir(one.root / ".shared" / "leases")) == 2
    assert_clean(one)


@pytest.mark.parametrize("made_again", [False, True])
@pytest.mark.parametrize("first_call", ["lookup", "load", "store", "touch", "usage"])
async def test_a_root_removed_by_hand_is_made_and_joined_again(pair, first_call, made_again):
    one, first, other, second = await open_both(pair, 4)
    capacity = 4 * one.object_bytes
    await one.put(first, *KEYS[:2])
    shutil.rmtree(one.root)
    if made_again:
        one.root.mkdir()
    if first_call == "lookup":
        assert await one.has(first, *KEYS[:2]) == [False, False]
    elif first_call == "load":
        (verdict,) = await first.load([one.empty(KEYS[0])])
        assert isinstance(verdict, ChunkNotFoundError)
    elif first_call == "store":
        assert await one.put(first, KEYS[0]) == [None]
        await first.delete([KEYS[0]])
    elif first_call == "touch":
        await first.touch([KEYS[0]])
    assert await first.usage() == Usage(0, 0, capacity, ANY)
    assert set(one.removed) == set(KEYS[:2])
    await one.put(first, *KEYS[2:5])
    await other.put(second, *KEYS[5:8])
    assert one.stored_bytes() == capacity
    assert (one.directory / "manifest.json").exists()
    assert await one.loads(first, KEYS[7])
    for tier in (first, second):
        assert await tier.usage() == Usage(4, capacity, capacity, ANY)
    assert len(one.header().reservations) == len(os.listdir(one.root / ".shared" / "leases")) == 2
    assert_clean(one)


@pytest.mark.parametrize("obstacle", ["no parent", "a file"])
async def test_a_root_that_cannot_be_made_again_is_an_outage_until_it_can(bench, obstacle):
    parent = bench.root
    bench.root = parent / "kv"
    tier = await bench.open()
    shutil.rmtree(parent)
    if obstacle == "a file":
        parent.mkdir()
        bench.root.write_bytes(b"mine")
    for _ in range(2):
        with pytest.raises(TierError):
            await bench.put(tier, KEYS[0])
        with pytest.raises(TierError):
            await bench.has(tier, KEYS[0])
    if obstacle == "a file":
        bench.root.unlink()
    else:
        assert not parent.exists()
        parent.mkdir()
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])


async def test_a_root_removed_again_and_again_costs_no_descriptor(bench):
    tier = await bench.open()
    before = sorted(os.listdir("/proc/self/fd"))
    for key in KEYS[:5]:
        shutil.rmtree(bench.root)
        assert await bench.put(tier, key) == [None]
    assert sorted(os.listdir("/proc/self/fd")) == before


async def test_a_failed_rejoin_is_tried_again(bench, monkeypatch):
    tier = await bench.open()
    shutil.rmtree(bench.root / ".shared")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(Exception, match="No locks available"):
            await bench.put(tier, KEYS[0])
    assert await bench.put(tier, KEYS[0]) == [None]
    assert len(os.listdir(bench.root / ".shared" / "leases")) == 1


@pytest.mark.parametrize("use", ["load", "store"])
async def test_a_file_put_there_by_hand_is_counted_when_it_is_used(bench, use):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    file = bench.file(KEYS[0])
    content = file.read_bytes()
    await tier.delete([KEYS[0]])
    file.write_bytes(content)
    assert (await tier.usage()).chunks == 0
    await use_chunk(use, bench, tier, KEYS[0])
    assert await tier.usage() == Usage(1, bench.object_bytes, None, ANY)
    assert_clean(bench)


async def test_who_joins_asks_first_those_who_have_a_reservation(bench, monkeypatch):
    """A joining process checks leases with a reservation first, because they are probably held."""
    await bench.open()
    leases = bench.root / ".shared" / "leases"
    (living,) = os.listdir(leases)
    for number in range(20):
        (leases / f"{number:016x}").touch()
    asked = []
    is_held = Leases.is_held

    def asking(self, name):
        asked.append(name)
        return is_held(self, name)

    monkeypatch.setattr(Leases, "is_held", asking)
    store = bench.make()._store
    store.open()
    store.count()
    # The count then checks every lease, to clean up after dead processes.
    assert asked[:2] == [living, living]
    assert len(asked) == 2 + 20
    store.close()


async def test_a_store_succeeds_without_room_for_the_ledger(pair, monkeypatch):
    one, first, other, second = await open_both(pair)
    real = os.pwrite

    def full(fd, data, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("/ledger"):
            raise OSError(errno.ENOSPC, "full")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert await one.put(first, *KEYS[:3]) == [None] * 3
        await second.delete([KEYS[0]])
        assert (await first.usage()).chunks == (await second.usage()).chunks == 2
        assert not one.header().clean
    assert (await second.usage()).chunks == 2
    assert one.removed == other.removed == [KEYS[0]]
    assert_clean(one)


async def test_a_lock_that_fails_fails_stores_and_not_loads(pair, monkeypatch):
    bench, tier, other, second = await open_both(pair)
    await bench.put(tier, KEYS[0])
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(Exception, match="No locks available"):
            await bench.put(tier, KEYS[1])
        assert await bench.loads(tier, KEYS[0])
        # The second tier has not counted the chunk yet.
        assert await other.loads(second, KEYS[0])
    assert await bench.put(tier, KEYS[1]) == [None]
    assert bench.temporaries() == []
    assert_clean(bench)


async def test_a_failed_open_leaves_no_lease_and_no_descriptor(bench, monkeypatch):
    before = sorted(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            await bench.open()
        assert os.listdir(bench.root / ".shared" / "leases") == []
        patch.setattr(fcntl, "flock", no_locks)
        with pytest.raises(Exception, match="No locks available"):
            await bench.open()
    assert sorted(os.listdir("/proc/self/fd")) == before
    await bench.open()
    assert_clean(bench)


async def test_a_lock_lost_after_the_write_leaves_no_file_and_no_reservation(bench, monkeypatch):
    tier = await bench.open(capacity=bench.object_bytes)
    with monkeypatch.context() as patch:
        real = os.pwritev

        def breaking(*args):
            patch.setattr(fcntl, "flock", no_locks)
            return real(*args)

        patch.setattr(os, "pwritev", breaking)
        with pytest.raises(Exception, match="No locks available"):
            await bench.put(tier, KEYS[0])
    assert bench.temporaries() == []
    assert await bench.put(tier, KEYS[0]) == [None]
    assert_clean(bench)


async def test_an_unexpected_error_causes_a_recount(pair, monkeypatch):
    one, other = pair
    capacity = 2 * one.object_bytes
    first, second = await one.open(capacity=capacity), await other.open()
    await one.put(first, *KEYS[:2])
    real = os.rename

    def rename(*args, **kwargs):
        real(*args, **kwargs)
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(ZeroDivisionError):
            await one.put(first, KEYS[2])
    assert one.temporaries() == []
    assert (await second.usage()).chunks == (await first.usage()).chunks == 1
    assert one.removed == KEYS[:1]
    assert_clean(one)


async def test_a_tier_opens_while_another_writes_too_much(pair, monkeypatch, make_gate):
    one, other = pair
    first = await one.open()
    gate = make_gate(os.pwritev)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", gate)
        store = asyncio.create_task(one.put(first, *KEYS[:2]))
        await gate.reached()
    second = await other.open(capacity=one.object_bytes)
    assert isinstance((await other.put(second, KEYS[2]))[0], TierCapacityError)
    gate.leave.set()
    assert await store == [None, None]
    assert await other.put(second, KEYS[2]) == [None]
    assert await second.usage() == Usage(1, one.object_bytes, one.object_bytes, ANY)


@pytest.fixture
def impatient_open(monkeypatch):
    monkeypatch.setattr("kvtier_file.tier._COUNT_S", 0.05)


@pytest.fixture
async def slow_count(bench, monkeypatch, make_gate, impatient_open):
    """Store a chunk, and return a gate that stops the next tier's count at its last shard."""
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    await bench.close()
    gate = make_gate(NamespaceDirectory.list_shard, after=255)
    monkeypatch.setattr(NamespaceDirectory, "list_shard", lambda *args: gate(*args))
    yield gate
    gate.leave.set()


async def test_lookups_and_loads_do_not_wait_for_the_count(bench, slow_count):
    tier = await bench.open()
    await slow_count.reached()
    store = asyncio.create_task(bench.put(tier, KEYS[1]))
    usage = asyncio.create_task(tier.usage())
    assert await bench.has(tier, *KEYS[:2]) == [True, False]
    assert await bench.loads(tier, KEYS[0])
    await tier.touch([KEYS[0]])
    assert (store.done(), usage.done()) == (False, False)
    slow_count.leave.set()
    assert await store == [None]
    assert (await tier.usage()).chunks == 2


async def test_the_next_store_repeats_a_failed_count(bench, slow_count, monkeypatch, caplog):
    tier = await bench.open()
    with monkeypatch.context() as patch:
        patch.setattr(Root, "headroom_bytes", lambda *args: os.fstat(-1))
        slow_count.leave.set()
        await asyncio.wait([tier._counting])
    assert "its chunks are not counted yet" in caplog.text
    assert await bench.put(tier, KEYS[1]) == [None]
    assert (await tier.usage()).chunks == 2


async def test_a_store_before_the_count_joins_for_both(
    bench, monkeypatch, make_gate, impatient_open
):
    late = make_gate(ChunkStore.count)
    monkeypatch.setattr(ChunkStore, "count", lambda *args: late(*args))
    tier = await bench.open()
    assert await bench.put(tier, KEYS[0]) == [None]
    late.leave.set()
    await tier._counting
    assert await bench.put(tier, KEYS[1]) == [None]
    assert await tier.usage() == Usage(2, 2 * bench.object_bytes, None, ANY)
    assert len(os.listdir(bench.root / ".shared" / "leases")) == 1


async def test_a_store_does_not_share_the_lock_with_the_count(bench, monkeypatch, impatient_open):
    await (await bench.open())._counting
    real, busy = fcntl.flock, set()

    def watched(fd, operation):
        if operation == fcntl.LOCK_UN:
            busy.discard(fd)
        elif operation == fcntl.LOCK_EX:
            assert fd not in busy
            busy.add(fd)
        real(fd, operation)

    with header_file(bench) as fd:
        real(fd, fcntl.LOCK_EX)
        monkeypatch.setattr(fcntl, "flock", watched)
        tier = await bench.open()
        store = asyncio.create_task(bench.put(tier, KEYS[0]))
        await asyncio.wait([store], timeout=0.1)
    assert await store == [None]
    await tier._counting
    assert_clean(bench)


async def test_a_tier_that_still_counts_is_closed(bench, slow_count):
    slow_count._after = 100
    tier = await bench.open()
    closing = asyncio.create_task(tier.close())
    while not tier._store._root.is_closing:
        await asyncio.sleep(0)
    slow_count.leave.set()
    await closing
    assert tier._counting.done()
    assert not os.listdir(bench.root / ".shared" / "leases")


async def test_a_chunk_removed_and_stored_again_is_not_reported(pair):
    one, first, other, second = await open_both(pair)
    await one.put(first, KEYS[0])
    await second.delete([KEYS[0]])
    await other.put(second, KEYS[0])
    await first.usage()
    assert one.removed == []


async def test_a_closed_tier_leaves_no_reservation_and_no_lease(pair):
    one, other = pair
    first = await one.open()
    await one.put(first, KEYS[0])
    await other.open()
    await one.close()
    await other.close()
    assert one.header().reservations == {}
    assert os.listdir(one.root / ".shared" / "leases") == []
