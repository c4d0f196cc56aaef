"""Jobs move the same bytes whether a kernel gathers pages or each run of bytes is copied."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_cuda import FakeCUDA, FakePageKernel, Stream, copy_pages, fake_cuda
from support.gated_copies import error_of, expect_success, filled
from support.gpu.memory import mapped

from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker import cuda as cuda_module
from kvtier_sdk.worker import gather as gather_module
from kvtier_sdk.worker.cuda import CUDADevice

Opener = Callable[..., OffloadWorker]

BLOCKS = 8
LAYERS = 16
WORDS = 32
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed here: make test-kernel",
)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, runtime: FakeCUDA) -> FakePageKernel:
    found = FakePageKernel(copy_pages)
    monkeypatch.setattr(cuda_module, "PageKernel", lambda device: found)
    monkeypatch.setattr(gather_module, "PART_BYTES", 3 * LAYERS * 8 * WORDS)
    return found


def layers(blocks: int = 32, words: int = WORDS) -> KVGroup:
    return KVGroup([KVTensor(aligned(blocks, 8 * words)) for _ in range(LAYERS)])


def opened_layers(opened: Opener) -> tuple[KVGroup, np.ndarray, OffloadWorker]:
    group = layers()
    host = mapped(32, group.chunk_bytes)
    return group, host, opened(group, host)


def aligned(*shape: int) -> torch.Tensor:
    flat = filled(int(np.prod(shape)) + 64)
    return flat[-flat.data_ptr() % 64 :][: int(np.prod(shape))].reshape(shape)


def stored(group: KVGroup, block: int) -> bytes:
    return b"".join(kv.tensor[block].numpy().tobytes() for kv in group.tensors)


@st.composite
def tensors(draw: st.DrawFn) -> list[KVTensor]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        page = 16 * draw(st.integers(1, 5))
        kinds: list[Callable[[], KVTensor]] = [
            lambda page=page: KVTensor(aligned(BLOCKS, page)),
            lambda page=page: KVTensor(aligned(2, BLOCKS, page), 1),
            lambda page=page: KVTensor(aligned(BLOCKS, page + 32)[:, :page]),
            lambda page=page: KVTensor(aligned(BLOCKS, 2, page + 16)[:, :, :page]),
        ]
        made.append(draw(st.sampled_from(kinds))())
    return made


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[KVGroup], DeviceBlocks, list[int]]:
    groups = [
        KVGroup(draw(tensors()), draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, 2)))
    ]
    ids, sizes, firsts, chunks = [], [], [], 0
    for group in groups:
        some = draw(st.lists(st.integers(0, BLOCKS - 1), unique=True, max_size=BLOCKS))
        first = draw(st.integers(0, 4))
        chunks += group.layout().slots_for(len(some), first) if some else 0
        ids += some
        sizes.append(len(some))
        firsts.append(first)
    slots = draw(st.permutations(range(chunks + 2)))[:chunks]
    return groups, DeviceBlocks(ids, sizes, firsts), slots


def page_kernel(name: str, patch: pytest.MonkeyPatch) -> FakePageKernel:
    if name == "python":
        return FakePageKernel(copy_pages)
    patch.setenv("TRITON_INTERPRET", "1")
    from kvtier_sdk.worker import kernel as kernel_module

    # With these values a page needs several tiles, and a program handles several pages.
    patch.setattr(kernel_module, "_TILE_WORDS", 4)
    patch.setattr(kernel_module, "_PROGRAMS", 3)
    return FakePageKernel(kernel_module.launch)


@pytest.mark.parametrize("name", ["python", pytest.param("triton", marks=needs_triton)])
@given(job=jobs())
def test_a_gathered_job_moves_the_same_bytes_as_one_that_is_copied_run_by_run(
    name: str, job: tuple[list[KVGroup], DeviceBlocks, list[int]]
) -> None:
    groups, blocks, slots = job
    tensors = [kv.tensor for group in groups for kv in group.tensors]
    part_bytes = max(group.chunk_bytes for group in groups)
    rows = max(slots, default=0) + 1
    memory = [mapped(rows, part_bytes + 48) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, fake_cuda():
        kernel = page_kernel(name, patch)
        patch.setattr(cuda_module, "PageKernel", lambda device: kernel)
        patch.setattr(gather_module, "MIN_GATHERED_RUNS", 1)
        patch.setattr(gather_module, "MIN_RUNS_PER_COPY", 0)
        # Most jobs and some chunks are larger than a staging part of this size.
        patch.setattr(gather_module, "PART_BYTES", 480)
        found = []
        for host, device in zip(memory, (None, CUDADevice(torch.device("cuda:0"))), strict=True):
            with OffloadWorker(groups, host[:, 16:-32], device=device) as worker:
                worker.submit_store(1, blocks, slots, after=Stream())
                expect_success(worker, 1)
                before = [tensor.clone() for tensor in tensors]
                for tensor in tensors:
                    tensor.zero_()
                worker.submit_load(2, blocks, slots, after=Stream())
                expect_success(worker, 2)
                found.append([tensor.clone() for tensor in tensors])
                for tensor, was in zip(tensors, before, strict=True):
                    tensor.copy_(was)
        assert set(kernel.launches) == ({True, False} if blocks.block_ids else set())
    assert np.array_equal(*memory)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("tensors", "pages", "page_bytes", "is_gathered"),
    [
        (8, 2, 8 * WORDS, True),
        # These jobs are not gathered: their runs are too few, too few per slot, or too long.
        (8, 1, 8 * WORDS, False),
        (3, 8, 8 * WORDS, False),
        (8, 2, 128 * 1024, False),
        # This job is not gathered, because its pages are not whole words of 16 bytes.
        (8, 2, 8 * WORDS - 8, False),
    ],
)
def test_jobs_of_many_short_runs_are_gathered(
    kernel: FakePageKernel,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    tensors: int,
    pages: int,
    page_bytes: int,
    is_gathered: bool,
) -> None:
    monkeypatch.setattr(gather_module, "PART_BYTES", 2 << 20)
    group = KVGroup([KVTensor(aligned(16, page_bytes)) for _ in range(tensors)])
    host = mapped(8, group.chunk_bytes)
    worker = opened(group, host)
    worker.submit_store(1, range(1, 2 * pages, 2), range(pages), after=Stream())
    expect_success(worker, 1)
    assert bool(kernel.launches) == is_gathered
    assert host[pages - 1].tobytes() == stored(group, 2 * pages - 1)


def test_blocks_that_make_long_runs_together_are_not_gathered(
    kernel: FakePageKernel, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_module, "PART_BYTES", 2 << 20)
    group = KVGroup([KVTensor(aligned(32, 16 * 1024)) for _ in range(16)], blocks_per_chunk=16)
    worker = opened(group, mapped(2, group.chunk_bytes))
    worker.submit_store(1, range(16), [1], after=Stream())
    expect_success(worker, 1)
    assert kernel.launches == []
    worker.submit_store(2, range(0, 32, 2), [0], after=Stream())
    expect_success(worker, 2)
    assert kernel.launches != []


def test_pages_among_those_of_other_workers_are_not_gathered(
    kernel: FakePageKernel, opened: Opener
) -> None:
    pages = [KVTensor(aligned(32, 1024)) for _ in range(16)]
    group = KVGroup(pages, places=[(2048 * layer, 2048 * 16) for layer in range(16)])
    host = mapped(16, group.chunk_bytes + 1024)
    host[:] = 0xA5
    worker = opened(group, host)
    worker.submit_store(1, range(0, 32, 2), range(16), after=Stream())
    expect_success(worker, 1)
    assert kernel.launches == []
    parts = host.reshape(16, 16, 2, 1024)
    assert (parts[:, :, 1] == 0xA5).all()
    assert parts[15, :, 0].tobytes() == stored(group, 30)


@pytest.mark.parametrize("limit_bytes", [1 << 60, 0], ids=["registered", "not registered"])
def test_one_copy_moves_what_lies_in_one_piece_on_the_host(
    runtime: FakeCUDA, kernel: FakePageKernel, opened: Opener, limit_bytes: int
) -> None:
    runtime.limit_bytes = limit_bytes
    group = layers()
    host = mapped(32, group.chunk_bytes + 64)[:, : group.chunk_bytes]
    worker = opened(group, host)
    runs: list[int] = []
    queue = runtime._queue
    runtime._queue = lambda some, stream: runs.extend(n for *_, n in some) or queue(some, stream)
    worker.submit_store(1, range(0, 20, 2), range(20, 0, -2), after=Stream())
    expect_success(worker, 1)
    assert runs == [group.chunk_bytes] * 10
    assert len(kernel.launches) == 4
    assert all(host[20 - block].tobytes() == stored(group, block) for block in range(0, 20, 2))


@pytest.mark.parametrize("operation", ["store", "load", "expedited"])
@pytest.mark.parametrize("held", ["computation", "kernels", "copies"])
@pytest.mark.parametrize("ids", [range(2, 4), range(2, 32, 2)])
def test_kernels_and_copies_wait_for_each_other(
    runtime: FakeCUDA, kernel: FakePageKernel, opened: Opener, operation: str, held: str, ids: range
) -> None:
    group = layers()
    host = mapped(32, group.chunk_bytes)
    host[:] = np.arange(32, dtype=np.uint8)[:, None]
    first = len(runtime.streams)
    worker = opened(group, host)
    # The device makes its streams in this order: one per lane for copies, one to prepare the
    # kernel, and one per lane for kernels.
    lane = ["store", "load", "expedited"].index(operation)
    computing = Stream()
    streams = {
        "computation": computing,
        "copies": runtime.streams[first + lane],
        "kernels": runtime.streams[first + 4 + lane],
    }
    gate = streams[held].hold()
    if operation == "store":
        worker.submit_store(1, ids, ids, after=computing)
    else:
        worker.submit_load(1, ids, ids, expedited=operation == "expedited", after=computing)
    runtime.advance()
    assert worker.get_finished() == []
    if held == "computation":
        # The job waits for this computation, which changes the pages.
        for kv in group.tensors:
            kv.tensor.add_(1)
    runtime.release(gate)
    expect_success(worker, 1)
    assert len(kernel.launches) == -(-len(ids) // 3)
    assert all(host[block].tobytes() == stored(group, block) for block in ids)
    if operation != "store":
        assert all((host[block] == block).all() for block in ids)


def test_jobs_share_the_parts(runtime: FakeCUDA, kernel: FakePageKernel, opened: Opener) -> None:
    group = layers()
    host = mapped(32, group.chunk_bytes)
    first = len(runtime.streams)
    worker = opened(group, host)
    gate = runtime.streams[first].hold()
    for job in range(8):
        worker.submit_store(job, [job, 31 - job], [job, 31 - job], after=Stream())
    runtime.advance()
    runtime.release(gate)
    expect_success(worker, *range(8))
    moved = [*range(8), *range(24, 32)]
    assert all(host[block].tobytes() == stored(group, block) for block in moved)


def test_a_large_job_is_queued_as_it_goes(
    runtime: FakeCUDA, kernel: FakePageKernel, opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = layers()
    monkeypatch.setattr(cuda_module, "WINDOW_BYTES", 6 * group.chunk_bytes)
    host = mapped(32, group.chunk_bytes)
    worker = opened(group, host)
    computing = Stream()
    gate = computing.hold()
    worker.submit_store(1, range(32), range(32), after=computing)
    assert len(kernel.launches) == 2
    # Stores keep their order; loads do not wait for stores.
    worker.submit_store(2, [3], [3], after=Stream())
    worker.submit_load(3, [30], [31], after=Stream())
    expect_success(worker, 3)
    assert kernel.launches == [True, True, False]
    for kv in group.tensors:
        kv.tensor.add_(1)
    runtime.release(gate)
    expect_success(worker, 1, 2)
    assert all(host[block].tobytes() == stored(group, block) for block in range(32))


@pytest.mark.parametrize("operation", ["submit_store", "submit_load"])
def test_after_a_kernel_that_failed_jobs_are_copied_run_by_run(
    kernel: FakePageKernel, opened: Opener, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    group, host, worker = opened_layers(opened)
    kernel.failures.append(ValueError("out of luck"))
    getattr(worker, operation)(1, range(10), range(10), after=Stream())
    assert error_of(worker, 1) == "the kernel that gathers pages failed: out of luck"
    assert "pages are copied one by one from now on: the kernel failed: out of luck" in caplog.text
    launches = len(kernel.launches)
    getattr(worker, operation)(2, range(9), range(9), after=Stream())
    expect_success(worker, 2)
    assert all(host[block].tobytes() == stored(group, block) for block in range(9))
    assert len(kernel.launches) == launches


@pytest.mark.parametrize("operation", ["submit_store", "submit_load"])
def test_a_job_whose_copy_is_refused_has_ended_when_its_kernel_has(
    runtime: FakeCUDA,
    kernel: FakePageKernel,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
) -> None:
    group, host, worker = opened_layers(opened)
    computing = Stream()
    gate = computing.hold()
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_queue", lambda *call: 1)
        getattr(worker, operation)(1, range(10), range(10), after=computing)
    assert worker.get_finished() == []
    runtime.release(gate)
    assert "error 1" in error_of(worker, 1)
    # The failed job's staging part is free for the next job.
    getattr(worker, operation)(2, range(9), range(9), after=Stream())
    expect_success(worker, 2)
    assert all(host[block].tobytes() == stored(group, block) for block in range(9))


def test_without_triton_pages_are_copied(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    group, host, worker = opened_layers(opened)
    assert "copied one by one, which is slower: No module named 'triton'" in caplog.text
    worker.submit_store(1, range(9), range(9), after=Stream())
    expect_success(worker, 1)
    assert all(host[block].tobytes() == stored(group, block) for block in range(9))


def test_a_kernel_that_cannot_be_compiled_is_told_at_the_start(
    kernel: FakePageKernel, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    kernel.failures.append(RuntimeError("Failed to find C compiler\nsee the manual"))
    group = layers()
    worker = opened(group, mapped(32, group.chunk_bytes))
    assert re.search(r"slower: Failed to find C compiler$", caplog.text, re.M)
    worker.submit_store(1, range(9), range(9), after=Stream())
    expect_success(worker, 1)
    assert kernel.launches == []
