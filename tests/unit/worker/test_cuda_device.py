"""An accelerator's worker runs on a fake runtime that enforces the rules of CUDA."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from support.fake_cuda import PAGE_BYTES, PATIENCE_S, FakeCUDA, Stream
from support.gated_copies import GRACE_S, error_of, expect_success, one_tensor
from support.gpu.memory import mapped

from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker import cuda as cuda_module
from kvtier_sdk.worker import registration as registration_module
from kvtier_sdk.worker.cuda import CUDADevice

Opener = Callable[..., OffloadWorker]


def held_stream() -> tuple[Stream, threading.Event]:
    computing = Stream()
    return computing, computing.hold()


@pytest.mark.parametrize("offset_bytes", [0, 100])
@pytest.mark.parametrize("page_bytes", [1000, PAGE_BYTES, 3 * PAGE_BYTES])
@pytest.mark.parametrize("shift_bytes", [0, 1 << 50])
def test_no_run_crosses_the_end_of_a_registration(
    runtime: FakeCUDA,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    offset_bytes: int,
    page_bytes: int,
    shift_bytes: int,
) -> None:
    monkeypatch.setattr(registration_module, "MAX_REGISTER_BYTES", 6 * PAGE_BYTES)
    runtime.shift_bytes = shift_bytes
    slots = 30
    memory = mapped(1, slots * page_bytes + PAGE_BYTES)[0][offset_bytes:]
    host = memory[: slots * page_bytes].reshape(slots, page_bytes)
    kv = one_tensor(2 * slots, page_bytes)
    worker = opened(kv, host)
    assert len(runtime.pieces) > 1
    worker.submit_store(1, range(slots), range(slots), after=Stream())
    expect_success(worker, 1)
    assert np.array_equal(host, kv.tensor[:slots].numpy())
    worker.submit_load(2, range(slots, 2 * slots), range(slots), after=Stream())
    expect_success(worker, 2)
    assert torch.equal(kv.tensor[slots:], kv.tensor[:slots])


@pytest.mark.parametrize("operation", ["submit_store", "submit_load"])
def test_a_job_without_a_stream_to_wait_for_is_refused(opened: Opener, operation: str) -> None:
    worker = opened(one_tensor(), mapped(16, 64))
    with pytest.raises(ValueError, match="needs 'after'"):
        getattr(worker, operation)(1, [1], [1])
    getattr(worker, operation)(1, [1], [1], after=Stream())
    expect_success(worker, 1)


@pytest.mark.parametrize("expedited", [False, True])
@pytest.mark.parametrize("by_event", [False, True])
def test_a_job_waits_for_the_stream_that_it_is_given(
    runtime: FakeCUDA, opened: Opener, by_event: bool, expedited: bool
) -> None:
    worker = opened(one_tensor(), mapped(16, 64))
    computing, gate = held_stream()
    after = computing.record_event() if by_event else computing
    worker.submit_store(1, [1], [1], after=after)
    worker.submit_load(2, [2], [2], expedited=expedited, after=after)
    # Work queued after the jobs must not delay them.
    later = computing.hold()
    assert worker.get_finished() == []
    runtime.release(gate)
    expect_success(worker, 1, 2)
    runtime.release(later)


def test_polling_does_not_disturb_a_capture(runtime: FakeCUDA, opened: Opener) -> None:
    worker = opened(one_tensor(), mapped(16, 64))
    computing, gate = held_stream()
    worker.submit_store(1, [1], [1], after=computing)
    runtime.capturing = True
    try:
        assert worker.get_finished() == []
        assert runtime.captures_lost == 0
        worker.submit_load(2, [2], [2], after=computing)
        runtime.release(gate)
        expect_success(worker, 1, 2)
        assert runtime.captures_lost == 0
        # Polling must not leave the thread's capture mode relaxed, so a plain query still fails.
        with pytest.raises(RuntimeError, match="capturing"):
            runtime.ask()
    finally:
        runtime.capturing = False


def test_a_question_that_is_not_answered_is_asked_again(runtime: FakeCUDA, opened: Opener) -> None:
    worker = opened(one_tensor(), mapped(16, 64))
    computing, gate = held_stream()
    worker.submit_store(1, [1], [1], after=computing)
    runtime.failures.append(RuntimeError("CUDA error: out of luck"))
    assert worker.get_finished() == []
    runtime.failures.extend([RuntimeError("CUDA error: out of luck")] * 4)
    runtime.release(gate)
    expect_success(worker, 1)


def test_a_lost_context_ends_its_jobs_with_its_error(runtime: FakeCUDA, opened: Opener) -> None:
    worker = opened(one_tensor(), mapped(16, 64))
    computing = Stream()
    computing.hold()
    worker.submit_store(1, [1], [1], after=computing)
    runtime.is_lost = True
    assert error_of(worker, 1) == "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "PIECE_BYTES", 2 * PAGE_BYTES)
    monkeypatch.setattr(cuda_module, "WINDOW_BYTES", 4 * PAGE_BYTES)


@pytest.mark.usefixtures("small_pieces")
def test_an_expedited_load_overtakes_large_ones(runtime: FakeCUDA, opened: Opener) -> None:
    kv = KVTensor(torch.zeros(64, PAGE_BYTES, dtype=torch.uint8))
    host = mapped(64, PAGE_BYTES)
    host[:] = np.arange(64, dtype=np.uint8)[:, None]
    worker = opened(kv, host)
    computing, gate = held_stream()
    for job, first in enumerate((0, 20)):
        ids = range(first, first + 20)
        worker.submit_load(job, ids, ids, after=computing)
    queued_bytes = sum(size_bytes for size_bytes, _ in runtime.copies)
    assert 0 < queued_bytes <= 4 * PAGE_BYTES
    worker.submit_load(2, [50], [50], expedited=True, after=Stream())
    expect_success(worker, 2)
    runtime.release(gate)
    expect_success(worker, 0, 1)
    assert torch.equal(kv.tensor[:40], torch.from_numpy(host[:40]))
    # The thread that queued the copies has ended; this job starts a new one.
    worker.submit_load(3, [0], [1], after=computing)
    expect_success(worker, 3)
    assert not [thread for thread in threading.enumerate() if thread.name == "kvtier-copies"]


def test_the_caller_of_a_job_of_many_runs_does_not_wait_for_the_stream(
    runtime: FakeCUDA, opened: Opener
) -> None:
    kv = one_tensor(10_000, 16)
    host = mapped(10_000, 16)
    worker = opened(kv, host)
    computing, gate = held_stream()
    ids, slots = range(0, 10_000, 2), range(9_999, 0, -2)
    for job in range(5):
        some = slice(job * 1000, (job + 1) * 1000)
        worker.submit_store(job, ids[some], slots[some], after=computing)
    assert worker.get_finished() == []
    runtime.release(gate)
    expect_success(worker, *range(5))
    assert np.array_equal(host[slots], kv.tensor[ids].numpy())


def test_no_piece_has_many_short_runs_beside_long_ones(runtime: FakeCUDA, opened: Opener) -> None:
    long, short = one_tensor(64, 16 * PAGE_BYTES), one_tensor(4000, 16)
    group = KVGroup([long])
    worker = OffloadWorker(
        [group, KVGroup([short])],
        mapped(4100, 16 * PAGE_BYTES),
        device=CUDADevice(torch.device("cuda:0")),
    )
    computing, gate = held_stream()
    blocks = DeviceBlocks([*range(0, 64, 2), *range(0, 4000, 2)], [32, 2000], [0, 0])
    worker.submit_load(1, blocks, range(2032), after=computing)
    runtime.release(gate)
    expect_success(worker, 1)
    worker.shutdown()


@pytest.mark.usefixtures("small_pieces")
def test_a_failed_load_ends(
    runtime: FakeCUDA, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = opened(one_tensor(64, PAGE_BYTES), mapped(64, PAGE_BYTES))
    computing, gate = held_stream()
    worker.submit_load(1, range(30), range(30), after=computing)
    calls: list[object] = []
    monkeypatch.setattr(runtime, "_queue", lambda *call: calls.append(call) or 1)
    runtime.release(gate)
    assert "error 1" in error_of(worker, 1)
    assert len(calls) == 1


@pytest.mark.usefixtures("small_pieces")
def test_a_large_load_ends_after_its_last_piece(runtime: FakeCUDA, opened: Opener) -> None:
    worker = opened(one_tensor(64, PAGE_BYTES), mapped(64, PAGE_BYTES))
    computing, gate = held_stream()
    worker.submit_load(1, range(30), range(30), after=computing)
    entered, leave = runtime.hold_calls()
    runtime.release(gate)
    assert entered.wait(PATIENCE_S)
    ended = worker.get_finished()
    leave.set()
    assert ended == []
    expect_success(worker, 1)


@pytest.mark.usefixtures("small_pieces")
def test_shutdown_waits_for_loads_not_yet_queued(runtime: FakeCUDA, opened: Opener) -> None:
    kv = one_tensor(64, PAGE_BYTES)
    host = mapped(64, PAGE_BYTES)
    worker = opened(kv, host)
    worker.submit_load(1, range(40), range(40), after=Stream())
    worker.shutdown()
    assert not kv.tensor[:40].any()
    assert runtime.pieces == {}


def test_submitting_does_not_keep_others_from_asking(runtime: FakeCUDA, opened: Opener) -> None:
    worker = opened(one_tensor(), mapped(16, 64))
    worker.submit_store(1, [1], [1], after=Stream())
    entered, leave = runtime.hold_calls()
    submit = partial(worker.submit_store, 2, [2], [2], after=Stream())
    submitter = threading.Thread(target=submit)
    submitter.start()
    assert entered.wait(PATIENCE_S)
    found: list[int] = []
    poller = threading.Thread(
        target=lambda: found.extend(result.job_id for result in worker.get_finished())
    )
    poller.start()
    poller.join(1)
    answered = not poller.is_alive()
    # Waiting for a job that is still being submitted must block.
    waiter = threading.Thread(target=worker.wait, args=([2],))
    waiter.start()
    waiter.join(GRACE_S)
    waited = not waiter.is_alive()
    leave.set()
    for thread in (poller, submitter, waiter):
        thread.join()
    assert answered
    assert not waited
    assert found == [1]
    expect_success(worker, 2)


def test_a_dropped_worker_unregisters_after_its_copies(runtime: FakeCUDA, opened: Opener) -> None:
    device = CUDADevice(torch.device("cuda:0"))
    kv, host = one_tensor(), mapped(16, 64)
    worker = OffloadWorker([KVGroup([kv])], host, device=device)
    computing, gate = held_stream()
    worker.submit_store(1, [1], [1], after=computing)
    del worker
    (end,) = [thread for thread in threading.enumerate() if thread.name == "kvtier-dropped-worker"]
    assert runtime.pieces != {}
    runtime.release(gate)
    end.join(PATIENCE_S)
    assert runtime.pieces == {}
    assert np.array_equal(host[1], kv.tensor[1].numpy())
