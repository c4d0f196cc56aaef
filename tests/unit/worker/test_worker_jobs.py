from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from support.gated_copies import GRACE_S, PATIENCE_S, Gate, one_tensor, until_finished

from kvtier_sdk import HostPool, KVTierError
from kvtier_sdk.worker import KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker import cpu as cpu_module
from kvtier_sdk.worker.cpu import CPUDevice


def test_submit_returns_at_once_and_wait_at_the_end_of_the_job(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_store(7, [1], [0])
    gate.until_begun()
    assert worker.get_finished() == []
    waited = threading.Event()
    waiter = threading.Thread(target=lambda: (worker.wait({7}), waited.set()))
    waiter.start()
    # A faulty wait returns within this time; a correct wait does not.
    waiter.join(GRACE_S)
    assert not waited.is_set()
    gate.open()
    waiter.join(PATIENCE_S)
    assert waited.is_set()
    (result,) = worker.get_finished()
    assert (result.job_id, result.success, result.size_bytes) == (7, True, 64)
    assert result.duration_s >= 0
    assert worker.get_finished() == []


def test_wait_copies_what_no_thread_has_begun(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_store(1, [1], [0])
    gate.until_begun()
    worker.submit_store(2, [2, 3], [1, 2])
    waiter = threading.Thread(target=worker.wait, args=([2],))
    waiter.start()
    # Job 1 holds the only copy thread, so job 2 can begin only in the waiting thread.
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


@pytest.mark.parametrize(("first", "expedited"), [("submit_store", False), ("submit_load", True)])
def test_a_load_overtakes_a_job_that_has_begun(
    gate: Gate, gated, monkeypatch: pytest.MonkeyPatch, first: str, expedited: bool
) -> None:
    monkeypatch.setattr(cpu_module, "MAX_PART_BYTES", 1024)
    worker = gated(one_tensor(16, 256))
    getattr(worker, first)(1, range(12), range(12))
    gate.until_begun()
    worker.submit_load(2, [14], [14], expedited=expedited)
    gate.open()
    until_finished(worker, 2)
    assert gate.began == [1024, 256, 1024, 1024]


def test_a_job_without_blocks_has_ended_at_once(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_load(1, [], [])
    worker.wait([1])
    (result,) = worker.get_finished()
    assert (result.success, result.size_bytes, result.duration_s) == (True, 0, 0.0)
    assert gate.began == []


def test_a_job_id_is_free_again_when_it_was_reported(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    worker.submit_store(1, [1], [0])
    with pytest.raises(ValueError, match="job 1 has not been reported"):
        worker.submit_load(1, [1], [0])
    gate.open()
    worker.wait([1])
    worker.wait([1])
    with pytest.raises(ValueError, match="job 1 has not been reported"):
        worker.submit_load(1, [1], [0])
    assert len(worker.get_finished()) == 1
    worker.wait([1, 99])
    worker.submit_load(1, [1], [0])


def test_a_failed_copy_is_reported_and_the_next_one_works(gate: Gate, gated, caplog) -> None:
    worker = gated(one_tensor())
    gate.failing.add(2 * 64)
    gate.open()
    worker.submit_store(1, [1, 2], [0, 1])
    worker.submit_store(2, [3], [2])
    worker.wait([1, 2])
    failed, well = sorted(worker.get_finished(), key=lambda result: result.job_id)
    assert (failed.success, failed.error) == (False, "OSError: no more than 128 bytes")
    assert (well.success, well.error) == (True, None)
    assert "store of job 1 failed: OSError" in caplog.text


def test_a_failed_copy_is_reported_only_when_its_other_parts_have_ended(
    gate: Gate, gated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_module, "MIN_PART_BYTES", 256)
    monkeypatch.setattr(cpu_module, "MAX_PART_BYTES", 256)
    worker = gated(one_tensor(16, 256), threads=2)
    worker.submit_store(1, range(6), range(6))
    gate.until_begun(2)
    # One of the two running parts fails; no other part has started.
    gate.failing.add(256)
    gate.open(1)
    worker.submit_load(2, range(2), range(2))
    gate.until_begun(1)
    assert worker.get_finished() == []
    # After the failure no more parts of the store start, and the free thread runs the load.
    gate.open()
    worker.wait([1, 2])
    assert [result.success for result in worker.get_finished()] == [False, False]
    assert len(gate.began) <= 4


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
    errors = {result.job_id: result.error for result in worker.get_finished()}
    assert errors == {1: None, 2: None}
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


EXIT = """
import atexit, threading
from support.gated_copies import Gate, one_tensor
from kvtier_sdk import HostPool
from kvtier_sdk.worker import KVGroup, OffloadWorker, worker as module
from kvtier_sdk.worker.cpu import CPUDevice

# Register this function first, because atexit runs its functions in reverse order.
atexit.register(lambda: print([t.name for t in threading.enumerate() if "dropped" in t.name]))
gate = Gate()
device = CPUDevice(threads=1, copy=gate)
# Memory this large is unmapped with its last reference, so a later copy would crash.
groups, slots = [KVGroup([one_tensor(8, 1 << 20)])], HostPool(8, 1 << 20).part(0)
worker = OffloadWorker(groups, slots, device=device)
worker.submit_store(1, range(8), range(8))
del groups, slots
gate.until_begun()
if ENDS:
    del worker
    atexit.register(gate.open)
else:
    module._EXIT_WAIT_S = 0.1
    del worker
"""


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("ends", "left"), [(True, []), (False, ["kvtier-dropped-worker"])])
def test_the_process_waits_for_a_dropped_worker_but_not_for_ever(
    ends: bool, left: list[str]
) -> None:
    assert run(EXIT.replace("ENDS", str(ends))) == f"{left}\n"


def test_a_dropped_worker_ends_and_says_so(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    before = set(threading.enumerate())
    kv, host = one_tensor(), np.zeros((16, 64), np.uint8)
    worker = OffloadWorker([KVGroup([kv])], host, device=CPUDevice(threads=2, copy=gate))
    worker.submit_store(1, [1], [1])
    gate.until_begun()
    del worker
    left = set(threading.enumerate()) - before
    assert "kvtier-dropped-worker" in {thread.name for thread in left}
    gate.open()
    for thread in left:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert np.array_equal(host[1], kv.tensor[1].numpy())
    assert "dropped without a call of shutdown()" in caplog.text


def test_shutdown_lets_go_of_slots_and_tensors(caplog: pytest.LogCaptureFixture) -> None:
    pool = HostPool(16, 64)
    tensor = torch.zeros(16, 64, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    worker = OffloadWorker([KVGroup([KVTensor(tensor)])], pool.part(0))
    worker.submit_store(1, [1], [1])
    worker.shutdown()
    del tensor
    gc.collect()
    assert alive() is None
    with caplog.at_level(logging.WARNING):
        pool.close()
    assert caplog.text == ""
    assert len(worker.get_finished()) == 1


def test_a_worker_that_cannot_be_made_closes_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(CPUDevice, "register", refuse)
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="no"):
        OffloadWorker([KVGroup([one_tensor()])], np.zeros((2, 64), np.uint8))
    assert threading.active_count() == before


def test_copy_threads_run_where_any_thread_of_the_process_may() -> None:
    everywhere = os.sched_getaffinity(0)
    found: list[set[int]] = []

    def engine() -> None:
        os.sched_setaffinity(0, {min(everywhere)})
        device = CPUDevice(threads=1, copy=lambda *_: found.append(os.sched_getaffinity(0)))
        host = np.zeros((16, 64), np.uint8)
        with OffloadWorker([KVGroup([one_tensor()])], host, device=device) as worker:
            worker.submit_load(1, [1], [1])
            until_finished(worker, 1)

    thread = threading.Thread(target=engine)
    thread.start()
    thread.join()
    assert found == [everywhere]
