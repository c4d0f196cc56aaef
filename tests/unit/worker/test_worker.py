"""The worker on CPU tensors: real bytes, real threads, and gates where order matters."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_sdk import ConfigError, HostPool, KVTierError, PoolLayout
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker import cpu as cpu_module
from kvtier_sdk.worker.cpu import CPUDevice, copy_runs
from kvtier_sdk.worker.device import Copy, Device
from kvtier_sdk.worker.planning import CopyPlan, HostLayout

PATIENCE_S = 30.0
GRACE_S = 0.02


class Gate:
    """A copier that stops before it copies, until it is opened.

    Attributes:
        began: bytes of each call that has begun, in order.
        failing: calls of this many bytes raise once the gate is open.
    """

    def __init__(self) -> None:
        self.began: list[int] = []
        self.failing: set[int] = set()
        self._started = threading.Semaphore(0)
        self._open = threading.Semaphore(0)

    def __call__(self, into: np.ndarray, out_of: np.ndarray, lengths: np.ndarray) -> None:
        size_bytes = int(lengths.sum())
        self.began.append(size_bytes)
        self._started.release()
        assert self._open.acquire(timeout=PATIENCE_S)
        if size_bytes in self.failing:
            raise OSError(f"no more than {size_bytes} bytes")
        copy_runs(into, out_of, lengths)

    def until_begun(self, calls: int = 1) -> None:
        for _ in range(calls):
            assert self._started.acquire(timeout=PATIENCE_S)

    def open(self, calls: int = 1000) -> None:
        self._open.release(calls)


def until_finished(worker: OffloadWorker, jobs: int) -> None:
    """Without ``wait``, whose thread would help."""
    ended = 0
    end_s = time.monotonic() + PATIENCE_S
    while ended < jobs:
        assert time.monotonic() < end_s
        time.sleep(0.001)
        ended += len(worker.get_finished())


def filled(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def one_tensor(blocks: int = 16, page_bytes: int = 64) -> KVTensor:
    return KVTensor(filled(blocks, page_bytes))


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open()


@pytest.fixture
def gated(gate: Gate) -> Iterator[Callable[..., OffloadWorker]]:
    """Make a worker whose copies stop at the gate; it is shut down with the test."""
    workers: list[OffloadWorker] = []

    def make(kv: KVTensor, *, threads: int = 1) -> OffloadWorker:
        host = np.zeros((kv.blocks, kv.page_bytes), np.uint8)
        device = CPUDevice(threads=threads, copy=gate)
        workers.append(OffloadWorker([KVGroup([kv])], host, device=device))
        return workers[-1]

    yield make
    gate.open()
    for worker in workers:
        worker.shutdown()


# --- bytes ---------------------------------------------------------------------------------


@st.composite
def caches(draw: st.DrawFn) -> list[KVGroup]:
    """Hybrid groups of tensors in every layout, over the same number of blocks or not."""
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        blocks = draw(st.integers(4, 12))
        tensors = []
        for _ in range(draw(st.integers(1, 3))):
            page = draw(st.sampled_from([1, 3, 16]))
            tensors.append(
                draw(
                    st.sampled_from(
                        [
                            lambda b=blocks, p=page: KVTensor(filled(b, p)),
                            lambda b=blocks, p=page: KVTensor(filled(2, b, p), 1),
                            lambda b=blocks, p=page: KVTensor(filled(b, 2, p).transpose(1, 2)),
                            lambda b=blocks, p=page: KVTensor(filled(b, 3, p)[:, 1]),
                            lambda b=blocks, p=page: KVTensor(filled(b * 2, p), kernel_blocks=2),
                            lambda b=blocks, p=page: KVTensor(filled(b, 2, p + 1)[:, :, :p]),
                            lambda b=blocks, p=page: KVTensor(
                                filled(b, 8 * p).view(torch.bfloat16).view(b, 2, -1)
                            ),
                        ]
                    )
                )()
            )
        groups.append(KVGroup(tensors, draw(st.integers(1, 4))))
    return groups


def page(kv: KVTensor, block: int) -> bytes:
    """A block's bytes, by indexing alone."""
    k = kv.kernel_blocks
    steps = kv.tensor.movedim(kv.block_dim, 0)[block * k : (block + 1) * k]
    return steps.contiguous().view(torch.uint8).numpy().tobytes()


def pages(group: KVGroup, block: int) -> list[bytes]:
    return [page(kv, block) for kv in group.tensors]


@settings(max_examples=60)
@given(caches(), st.data())
def test_blocks_come_back_into_other_blocks(groups: list[KVGroup], data: st.DataObject) -> None:
    """Every group at once, into scattered slots, then any stretch of it into other blocks."""
    stored, sizes, slots_of = [], [], []
    free = data.draw(st.permutations(range(64)))
    for group in groups:
        blocks = group.tensors[0].blocks
        ids = data.draw(st.permutations(range(blocks)))
        ids = ids[: data.draw(st.integers(0, blocks))]
        chunks = -(-len(ids) // group.blocks_per_chunk)
        stored.append(ids)
        sizes.append(len(ids))
        slots_of.append(free[:chunks])
        free = free[chunks:]
    part_bytes = max(group.chunk_bytes for group in groups)
    region = np.full((64, part_bytes + 24), 0xA5, np.uint8)
    with OffloadWorker(groups, region[:, 8 : 8 + part_bytes]) as worker:
        everything = [block for ids in stored for block in ids]
        flat = [slot for slots in slots_of for slot in slots]
        worker.submit_store(1, DeviceBlocks(everything, sizes, [0] * len(groups)), flat)
        worker.wait([1])
        (result,) = worker.get_finished()
        assert result.success
        assert result.operation is Operation.STORE
        assert result.size_bytes == sum(
            len(ids) * group.chunk_bytes // group.blocks_per_chunk
            for group, ids in zip(groups, stored, strict=True)
        )
        # Neither the rows' neighbours nor slots of nobody were written.
        assert (region[:, :8] == 0xA5).all()
        assert (region[:, 8 + part_bytes :] == 0xA5).all()
        assert (region[free] == 0xA5).all()

        firsts, counts, targets, sources, untouched = [], [], [], [], []
        for group, ids, slots in zip(groups, stored, slots_of, strict=True):
            per_chunk = group.blocks_per_chunk
            first = data.draw(st.integers(0, max(0, len(ids) - 1)))
            count = data.draw(st.integers(0, len(ids) - first)) if ids else 0
            into = data.draw(st.permutations(range(group.tensors[0].blocks)))
            targets.append(into[:count])
            untouched.append({block: pages(group, block) for block in into[count:]})
            firsts.append(first)
            counts.append(count)
            end = -(-(first + count) // per_chunk)
            sources += slots[first // per_chunk : end] if count else []
        originals = [
            [pages(group, ids[first + n]) for n in range(count)]
            for group, ids, first, count in zip(groups, stored, firsts, counts, strict=True)
        ]
        flat_targets = np.array([block for into in targets for block in into], np.int32)
        worker.submit_load(2, DeviceBlocks(flat_targets, counts, firsts), sources)
        worker.wait([2])
        assert [found.success for found in worker.get_finished()] == [True]
    for group, into, original, others in zip(groups, targets, originals, untouched, strict=True):
        assert [pages(group, block) for block in into] == original
        assert {block: pages(group, block) for block in others} == others


def test_groups_may_share_a_tensor() -> None:
    kv = one_tensor()
    before = kv.tensor.clone()
    host = np.zeros((4, 64), np.uint8)
    with OffloadWorker([KVGroup([kv]), KVGroup([kv])], host) as worker:
        worker.submit_store(1, DeviceBlocks([1, 2, 3], [1, 2]), [0, 1, 2])
        worker.wait([1])
        with pytest.raises(ValueError, match="a block twice"):
            worker.submit_load(2, DeviceBlocks([5, 5], [1, 1]), [0, 1])
        worker.submit_load(2, DeviceBlocks([5, 6, 7], [1, 2]), [0, 1, 2])
        worker.wait([2])
    assert torch.equal(kv.tensor[5:8], before[1:4])


def test_each_worker_has_its_part_of_every_slot_of_a_host_pool() -> None:
    pool = HostPool.create(PoolLayout(4, 200, workers=2))
    caches = [one_tensor(page_bytes=100), one_tensor(page_bytes=100)]
    for rank, kv in enumerate(caches):
        with OffloadWorker([KVGroup([kv], 2)], pool.part(rank)) as worker:
            worker.submit_store(1, [3, 9, 4], [2, 0])
            worker.wait([1])
            assert worker.get_finished()[0].success
    slot = bytes(pool.view(2))
    for rank, kv in enumerate(caches):
        assert slot[pool.layout.part_offset(rank) :][:200] == page(kv, 3) + page(kv, 9)
    del worker
    pool.close()


def test_a_worker_of_a_replicated_pool_loads_what_the_first_one_stored() -> None:
    pool = HostPool.create(PoolLayout(4, 64, workers=2, replicated=True))
    first, second = one_tensor(), one_tensor()
    with OffloadWorker([KVGroup([first])], pool.part(0)) as worker:
        worker.submit_store(1, [3], [2])
        worker.wait([1])
    with OffloadWorker([KVGroup([second])], pool.part(1)) as worker:
        with pytest.raises(KVTierError, match="read-only"):
            worker.submit_store(1, [3], [2])
        worker.submit_load(1, [5], [2])
        worker.wait([1])
    assert page(second, 5) == page(first, 3)
    del worker
    pool.close()


def test_large_blocks_are_copied_in_parts_by_all_threads() -> None:
    kv = one_tensor(8, 5 * 1024 * 1024 + 13)
    host = np.zeros((8, kv.page_bytes), np.uint8)
    with OffloadWorker([KVGroup([kv])], host, device=CPUDevice(threads=3)) as worker:
        worker.submit_store(1, [6, 1, 2, 3], [0, 5, 6, 2])
        worker.wait([1])
    for block, slot in ((6, 0), (1, 5), (2, 6), (3, 2)):
        assert page(kv, block) == host[slot].tobytes()


# --- when ----------------------------------------------------------------------------------


def test_submit_returns_before_anything_is_copied(gate: Gate, gated) -> None:
    kv = one_tensor()
    worker = gated(kv)
    worker.submit_store(7, [1], [0])
    gate.until_begun()
    assert worker.get_finished() == []
    gate.open()
    worker.wait([7])
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.size_bytes) == (7, True, 64)
    assert result.duration_s >= 0
    assert worker.get_finished() == []


def test_wait_blocks_until_the_job_has_ended(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_store(1, [1], [0])
    gate.until_begun()
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (worker.wait({1}), waited.set()))
    waiter.start()
    # A grace for a wait that wrongly returns; a right one cannot, however long this takes.
    waiter.join(GRACE_S)
    assert not waited.is_set()
    gate.open()
    waiter.join(PATIENCE_S)
    assert waited.is_set()
    assert len(worker.get_finished()) == 1


def test_wait_copies_what_no_thread_has_begun(gate: Gate, gated) -> None:
    kv = one_tensor()
    worker = gated(kv)
    worker.submit_store(1, [1], [0])
    gate.until_begun()
    worker.submit_store(2, [2, 3], [1, 2])
    waiter = threading.Thread(target=worker.wait, args=([2],))
    waiter.start()
    # The only thread is held in job 1: whoever begins job 2 is another.
    gate.until_begun()
    assert gate.began == [64, 128]
    assert worker.get_finished() == []
    gate.open()
    waiter.join(PATIENCE_S)
    until_finished(worker, 2)
    assert gate.began == [64, 128]


def test_loads_overtake_stores_and_expedited_loads_overtake_loads(gate: Gate, gated) -> None:
    worker = gated(one_tensor(32, 8))
    worker.submit_store(1, range(1), range(1))
    gate.until_begun()
    worker.submit_store(2, range(2), range(2))
    worker.submit_load(3, range(3), range(3))
    worker.submit_store(4, range(4), range(4))
    worker.submit_load(5, range(5), range(5))
    worker.submit_load(6, range(6), range(6), expedited=True)
    worker.submit_load(7, range(7), range(7), expedited=True)
    gate.open()
    until_finished(worker, 7)
    assert [size // 8 for size in gate.began] == [1, 6, 7, 3, 5, 2, 4]


def test_a_load_overtakes_a_store_that_has_begun(
    gate: Gate, gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_module, "MAX_PART_BYTES", 1024)
    worker = gated(one_tensor(16, 256))
    worker.submit_store(1, range(12), range(12))
    gate.until_begun()
    worker.submit_load(2, [14], [14])
    gate.open()
    until_finished(worker, 2)
    assert gate.began == [1024, 256, 1024, 1024]


def test_two_threads_copy_at_once(gate: Gate, gated) -> None:
    worker = gated(one_tensor(), threads=2)
    worker.submit_store(1, [1], [0])
    worker.submit_store(2, [2], [1])
    gate.until_begun(2)
    gate.open()
    worker.wait([1, 2])
    assert {result.job_id for result in worker.get_finished()} == {1, 2}


def test_a_job_without_blocks_has_ended_at_once(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_load(1, [], [])
    worker.wait([1])
    (result,) = worker.get_finished()
    assert (result.success, result.size_bytes, result.duration_s) == (True, 0, 0.0)
    assert gate.began == []


def test_wait_takes_what_was_reported_and_what_never_was(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    gate.open()
    worker.submit_store(1, [1], [0])
    worker.wait([1])
    worker.wait([1])
    assert len(worker.get_finished()) == 1
    worker.wait([1, 99])


def test_a_job_id_is_free_again_when_it_was_reported(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_store(1, [1], [0])
    with pytest.raises(ValueError, match="job 1 has not been reported"):
        worker.submit_load(1, [1], [0])
    gate.open()
    worker.wait([1])
    with pytest.raises(ValueError, match="job 1 has not been reported"):
        worker.submit_load(1, [1], [0])
    worker.get_finished()
    worker.submit_load(1, [1], [0])


# --- failures ------------------------------------------------------------------------------


def test_a_failed_copy_is_reported_and_the_next_one_works(gate: Gate, gated, caplog) -> None:
    kv = one_tensor()
    worker = gated(kv)
    gate.failing.add(2 * 64)
    gate.open()
    worker.submit_store(1, [1, 2], [0, 1])
    worker.submit_store(2, [3], [2])
    worker.wait([1, 2])
    failed, well = sorted(worker.get_finished(), key=lambda result: result.job_id)
    assert not failed.success
    assert failed.error == "OSError: no more than 128 bytes"
    assert well.success
    assert well.error is None
    assert "store of job 1 failed: OSError" in caplog.text


def test_a_failed_copy_is_reported_only_when_its_other_parts_have_ended(
    gate: Gate, gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_module, "MIN_PART_BYTES", 256)
    monkeypatch.setattr(cpu_module, "MAX_PART_BYTES", 256)
    worker = gated(one_tensor(16, 256), threads=2)
    worker.submit_store(1, range(6), range(6))
    gate.until_begun(2)
    # One of the two that run fails; nobody else has passed the gate.
    gate.failing.add(256)
    gate.open(1)
    worker.submit_load(2, range(2), range(2))
    gate.until_begun(1)
    assert worker.get_finished() == []
    # What had not begun never does: the load took the place of the third part.
    gate.open()
    worker.wait([1, 2])
    assert {result.job_id: result.success for result in worker.get_finished()} == {
        1: False,
        2: False,
    }
    assert len(gate.began) <= 4


# --- the end -------------------------------------------------------------------------------


def test_shutdown_waits_for_what_runs_and_for_what_is_queued(gate: Gate, gated) -> None:
    kv = one_tensor()
    worker = gated(kv)
    worker.submit_store(1, [1], [0])
    gate.until_begun()
    worker.submit_load(2, [2], [0])
    ended = threading.Event()
    closer = threading.Thread(target=lambda: (worker.shutdown(), ended.set()))
    closer.start()
    closer.join(GRACE_S)
    assert not ended.is_set()
    gate.open()
    closer.join(PATIENCE_S)
    assert ended.is_set()
    assert len(gate.began) == 2
    assert torch.equal(kv.tensor[2], kv.tensor[1])
    worker.shutdown()
    assert [(result.job_id, result.error) for result in worker.get_finished()] == [
        (1, None),
        (2, None),
    ]
    worker.wait([1, 2, 3])
    with pytest.raises(KVTierError, match="shut down"):
        worker.submit_store(3, [1], [0])


def test_no_thread_is_left() -> None:
    before = threading.active_count()
    with OffloadWorker([KVGroup([one_tensor()])], np.zeros((2, 64), np.uint8)) as worker:
        worker.submit_store(1, [1], [0])
        assert threading.active_count() > before
    assert threading.active_count() == before
    assert len(worker.get_finished()) == 1


class Refusing(Device):
    """A device whose memory cannot be registered at all."""

    closed = False

    def register(self, host: HostLayout) -> None:
        raise RuntimeError("no")

    def start(self, plan: CopyPlan, operation: Operation, *, expedited: bool) -> Copy:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


def test_a_worker_that_cannot_be_made_closes_its_device() -> None:
    device = Refusing()
    with pytest.raises(RuntimeError, match="no"):
        OffloadWorker([KVGroup([one_tensor()])], np.zeros((2, 64), np.uint8), device=device)
    assert device.closed


# --- bad geometry --------------------------------------------------------------------------


def test_a_chunk_must_fit_into_a_part() -> None:
    host = np.zeros((4, 127), np.uint8)
    with pytest.raises(ConfigError, match="group 1 has 128 B, a part of a slot only 127 B"):
        OffloadWorker([KVGroup([one_tensor()]), KVGroup([one_tensor()], 2)], host)


def test_a_worker_needs_a_group_on_one_device_that_it_knows() -> None:
    host = np.zeros((4, 64), np.uint8)
    with pytest.raises(ConfigError, match="at least one"):
        OffloadWorker([], host)
    elsewhere = KVGroup([KVTensor(torch.zeros(4, 4, device="meta"))])
    with pytest.raises(ConfigError, match="on one device, not on cpu, meta"):
        OffloadWorker([KVGroup([one_tensor()]), elsewhere], host)
    with pytest.raises(ConfigError, match="no worker for tensors on 'meta'"):
        OffloadWorker([elsewhere], host)


@pytest.mark.parametrize("verb", ["submit_store", "submit_load"])
@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        (DeviceBlocks([16], [1, 0]), [0], "group 0 must be from 0 to 15, not 16"),
        (DeviceBlocks([-1], [1, 0]), [0], "group 0 must be from 0 to 15, not -1"),
        (DeviceBlocks([0, 1, 9], [2, 1]), [0, 1], "group 1 must be from 0 to 7, not 9"),
        (DeviceBlocks([0], [1, 0]), [6], "slots must be from 0 to 5, not 6"),
        (DeviceBlocks([0], [1, 0]), [-1], "slots must be from 0 to 5, not -1"),
        (DeviceBlocks([0, 1, 2], [3, 0]), [0], "1 slots, but the blocks touch 2 chunks"),
        (DeviceBlocks([0, 1], [2, 0], [1, 0]), [0], "1 slots, but the blocks touch 2 chunks"),
        (DeviceBlocks([0, 1], [2, 0]), [0, 1], "2 slots, but the blocks touch 1 chunks"),
        (DeviceBlocks([0, 1], [1, 0]), [0], "2 block ids, but group_sizes add up to 1"),
        (DeviceBlocks([0], [1]), [0], "group_sizes has 1 groups; there are 2"),
        (DeviceBlocks([0], [1, 0, 0]), [0], "group_sizes has 3 groups; there are 2"),
        (DeviceBlocks([0], [1, 0], [0]), [0], "first_blocks has 1 groups; there are 2"),
        (DeviceBlocks([0], [2, -1]), [0], "group_sizes has a negative number"),
        (DeviceBlocks([0], [1, 0], [-1, 0]), [0], "first_blocks has a negative number"),
        (DeviceBlocks([0.5], [1, 0]), [0], "must be a row of integers"),
        (DeviceBlocks([True], [1, 0]), [0], "must be a row of integers"),
        (DeviceBlocks([[0]], [1, 0]), [0], "must be a row of integers"),
        (DeviceBlocks([0], [1, 0]), [1.0], "slots must be a row of integers"),
        ([0], [0], "group_sizes is needed: there are 2 groups"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_before_anything_is_copied(
    gate: Gate, verb: str, blocks, slots, message: str
) -> None:
    groups = [KVGroup([one_tensor()], 2), KVGroup([one_tensor(8)])]
    device = CPUDevice(threads=1, copy=gate)
    with OffloadWorker(groups, np.zeros((6, 128), np.uint8), device=device) as worker:
        with pytest.raises(ValueError, match=message):
            getattr(worker, verb)(1, blocks, slots)
        assert gate.began == []
        assert worker.get_finished() == []


def test_what_is_written_is_named_once(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    with pytest.raises(ValueError, match="a store names a slot twice"):
        worker.submit_store(1, [1, 2], [3, 3])
    with pytest.raises(ValueError, match="a load names a block twice"):
        worker.submit_load(1, [1, 1], [3, 4])
    assert gate.began == []
    gate.open()
    # Reading twice does no harm.
    worker.submit_store(1, [1, 1], [3, 4])
    worker.wait([1])
    worker.submit_load(2, [1, 2], [3, 3])
    worker.wait([2])
    assert all(result.success for result in worker.get_finished())


# --- surroundings --------------------------------------------------------------------------


def test_copy_threads_run_where_any_thread_of_the_process_may() -> None:
    everywhere = os.sched_getaffinity(0)
    pinned = threading.Event()
    made: list[CPUDevice] = []

    def engine() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        made.append(CPUDevice(threads=1, copy=check))
        pinned.set()

    found: list[set[int]] = []

    def check(*_: object) -> None:
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=engine)
    thread.start()
    assert pinned.wait(PATIENCE_S)
    thread.join()
    one = np.ones(1, np.int64)
    made[0].start(CopyPlan(one, one, one), Operation.LOAD, expedited=False).wait()
    made[0].close()
    assert found == [everywhere]


def test_without_torch_the_worker_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvtier_sdk.worker"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith(
        "ConfigError: kvtier_sdk.worker needs torch: pip install 'kvtier-sdk[torch]'"
    )
