"""The worker on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.gpu.accelerator import computing
from support.gpu.copies import random_blocks
from support.gpu.memory import mapped

from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker import cuda as cuda_module
from kvtier_sdk.worker import gather as gather_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

BLOCKS = 64


LAYOUTS: dict[str, Callable[[], list[KVTensor]]] = {
    "pages": lambda: [KVTensor(random_blocks(BLOCKS, 16384)) for _ in range(3)],
    "keys apart from values": lambda: [
        KVTensor(random_blocks(2, BLOCKS, 4096), 1) for _ in range(3)
    ],
    "padded": lambda: [KVTensor(random_blocks(BLOCKS, 1000)[:, :900])],
    "kernel blocks": lambda: [KVTensor(random_blocks(BLOCKS * 4, 512).unflatten(0, (-1, 4)))],
}


@pytest.fixture(params=["batch", "each", "gathered"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "gathered":
        monkeypatch.setattr(gather_module, "MIN_GATHERED_RUNS", 1)
        monkeypatch.setattr(gather_module, "MIN_RUNS_PER_COPY", 0)
        monkeypatch.setattr(gather_module, "PART_BYTES", 300_000)
    if request.param == "each":
        monkeypatch.setattr(cuda_module.CUDADevice, "register", lambda self, host, groups: None)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_blocks_come_back_into_other_blocks(layout: str, per_chunk: int) -> None:
    group = KVGroup(LAYOUTS[layout](), per_chunk)
    chooser = np.random.default_rng(0)
    ids = chooser.permutation(BLOCKS // 2)
    region = mapped(100, group.chunk_bytes + 64)
    slots = chooser.permutation(100)[: -(-len(ids) // per_chunk)]
    with OffloadWorker([group], region[:, 32 : 32 + group.chunk_bytes]) as worker:
        worker.submit_store(1, ids, slots, after=computing())
        worker.submit_store(2, [], [], after=computing())
        worker.wait([1])
        stored = {result.job_id: result for result in worker.get_finished()}
        assert stored[1].success
        assert stored[1].size_bytes == len(ids) * group.chunk_bytes // per_chunk
        assert not region[:, :32].any()
        assert not region[:, 32 + group.chunk_bytes :].any()
        blocks = DeviceBlocks(ids[4:] + 32, None, [4])
        worker.submit_load(3, blocks, slots[4 // per_chunk :], after=computing())
        worker.wait([3])
        (loaded,) = worker.get_finished()
        assert loaded.success
        assert loaded.duration_s > 0
    for kv in group.tensors:
        for block in ids[4:].tolist():
            assert torch.equal(steps(kv, block + 32), steps(kv, block))


def steps(kv: KVTensor, block: int) -> torch.Tensor:
    return kv.tensor.select(kv.block_dim, block)


def layers(blocks: int, page_bytes: int) -> KVGroup:
    return KVGroup([KVTensor(random_blocks(blocks, page_bytes)) for _ in range(32)])


@pytest.mark.parametrize("page_bytes", [2048, 16384, 65536])
@pytest.mark.parametrize("expedited", [False, True])
def test_small_pages_of_many_layers_are_gathered(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    page_bytes: int,
    expedited: bool,
) -> None:
    group = layers(256, page_bytes)
    host = mapped(256, group.chunk_bytes)
    chooser = np.random.default_rng(0)
    launches: list[bool] = []
    start = gather_module.PageKernel.start

    def counted(kernel: gather_module.PageKernel, *arguments: object, gather: bool) -> None:
        launches.append(gather)
        start(kernel, *arguments, gather=gather)

    with OffloadWorker([group], host) as worker:
        assert caplog.text == ""
        monkeypatch.setattr(gather_module.PageKernel, "start", counted)
        blocks, slots = chooser.permutation(128), chooser.permutation(256)[:128]
        worker.submit_store(1, blocks, slots, after=computing())
        worker.wait([1])
        worker.submit_load(2, blocks + 128, slots, expedited=expedited, after=computing())
        worker.wait([2])
        assert [result.error for result in worker.get_finished()] == [None, None]
    assert set(launches) == {True, False}
    stored = np.stack([kv.tensor[blocks].cpu().numpy() for kv in group.tensors], 1)
    assert np.array_equal(host[slots], stored.reshape(128, -1))
    for kv in group.tensors:
        assert torch.equal(kv.tensor[blocks + 128], kv.tensor[blocks])


def test_the_kernel_waits_for_the_computation_that_was_queued_before_it() -> None:
    group = layers(64, 16384)
    host = mapped(64, group.chunk_bytes)
    host[:] = 9
    # The first launch of ``fill_`` loads code, which waits for the device.
    group.tensors[0].tensor.fill_(1)
    with OffloadWorker([group], host) as worker:
        torch.cuda._sleep(200_000_000)
        for kv in group.tensors:
            kv.tensor.fill_(7)
        worker.submit_store(1, range(0, 32, 2), range(16), after=computing())
        worker.submit_load(2, range(1, 32, 2), range(16, 32), after=computing())
        assert worker.get_finished() == []
        worker.wait([1, 2])
        assert [result.error for result in worker.get_finished()] == [None, None]
    assert (host[:16] == 7).all()
    for kv in group.tensors:
        assert (kv.tensor[1:32:2] == 9).all()
        assert (kv.tensor[0:32:2] == 7).all()


def test_a_registration_is_shared(caplog: pytest.LogCaptureFixture) -> None:
    kv = KVTensor(random_blocks(4, 4096))
    host = mapped(4, 4096)
    with OffloadWorker([KVGroup([kv])], host) as first:
        with OffloadWorker([KVGroup([kv])], host):
            assert caplog.text == ""
        first.submit_store(1, [1], [1], after=computing())
        first.wait([1])
        assert first.get_finished()[0].success
    assert host[1].tobytes() == kv.tensor[1].cpu().numpy().tobytes()


def test_memory_that_torch_has_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    kv = KVTensor(random_blocks(4, 4096))
    host = torch.zeros(4, 4096, dtype=torch.uint8, pin_memory=True)
    with OffloadWorker([KVGroup([kv])], host) as worker:
        assert caplog.text == ""
        worker.submit_store(1, [1], [1], after=computing())
        worker.wait([1])
        assert worker.get_finished()[0].success
    assert host.is_pinned()
    assert torch.equal(host[1], kv.tensor[1].cpu())


def test_memory_beside_the_slots_can_be_copied() -> None:
    """If a shared page were registered, the driver would refuse to copy the neighbouring arrays."""
    kv = KVTensor(random_blocks(4, 4096))
    # If the array began at a page boundary, the worker would mistake it for a whole mapping.
    whole = np.frombuffer(mapped(17, 4096).reshape(-1).data[500:], np.uint8)
    begin, end = 4 * 4096, 8 * 4096
    host = whole[begin:end].reshape(4, 4096)
    with OffloadWorker([KVGroup([kv])], host) as worker:
        for neighbour in (whole[:begin], whole[end:]):
            assert not torch.from_numpy(neighbour).cuda().any()
        worker.submit_store(1, [1], [1], after=computing())
        worker.wait([1])
        assert worker.get_finished()[0].success
    assert np.array_equal(host[1], kv.tensor[1].cpu().numpy())


def test_memory_that_is_not_registered_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    kv = KVTensor(random_blocks(4, 4096))
    host = mapped(4, 4096)
    # The driver refuses to register memory if some of its pages are registered already.
    calls = torch.cuda.cudart()
    assert int(calls.cudaHostRegister(host.ctypes.data + 4096, 4096, 0)) == 0
    try:
        with OffloadWorker([KVGroup([kv])], host) as worker:
            assert "did not register 16 KiB" in caplog.text
            # The error from the refused call must not surface in the engine's next kernel.
            kv.tensor.add_(1)
            worker.submit_store(1, [1, 2, 3], [0, 2, 3], after=computing())
            worker.wait([1])
            assert worker.get_finished()[0].success
    finally:
        assert int(calls.cudaHostUnregister(host.ctypes.data + 4096)) == 0
    assert host[2].tobytes() == kv.tensor[2].cpu().numpy().tobytes()
