"""The worker on a CUDA or ROCm device."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker import cuda as cuda_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA or ROCm device"),
]

BLOCKS = 64


def filled(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


LAYOUTS: dict[str, Callable[[], list[KVTensor]]] = {
    "pages": lambda: [KVTensor(filled(BLOCKS, 16384)) for _ in range(3)],
    "keys apart from values": lambda: [KVTensor(filled(2, BLOCKS, 4096), 1) for _ in range(3)],
    "padded": lambda: [KVTensor(filled(BLOCKS, 1000)[:, :900])],
    "kernel blocks": lambda: [KVTensor(filled(BLOCKS * 4, 512), kernel_blocks=4)],
}


@pytest.fixture(params=["batch", "each"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways through the driver: registered memory in a batch, other memory run by run."""
    if request.param == "each":
        monkeypatch.setattr(cuda_module.CUDADevice, "register", lambda self, host: None)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("per_chunk", [1, 3])
def test_blocks_come_back_into_other_blocks(layout: str, per_chunk: int) -> None:
    group = KVGroup(LAYOUTS[layout](), per_chunk)
    chooser = np.random.default_rng(0)
    ids = chooser.permutation(BLOCKS // 2)
    region = np.zeros((100, group.chunk_bytes + 64), np.uint8)
    slots = chooser.permutation(100)[: -(-len(ids) // per_chunk)]
    with OffloadWorker([group], region[:, 32 : 32 + group.chunk_bytes]) as worker:
        worker.submit_store(1, ids, slots)
        worker.submit_store(2, [], [])
        worker.wait([1])
        stored = {result.job_id: result for result in worker.get_finished()}
        assert stored[1].success
        assert stored[1].size_bytes == len(ids) * group.chunk_bytes // per_chunk
        assert not region[:, :32].any()
        assert not region[:, 32 + group.chunk_bytes :].any()
        worker.submit_load(3, DeviceBlocks(ids[4:] + 32, None, [4]), slots[4 // per_chunk :])
        worker.wait([3])
        (loaded,) = worker.get_finished()
        assert loaded.success
        assert loaded.duration_s > 0
    for kv in group.tensors:
        for block in ids[4:].tolist():
            assert torch.equal(steps(kv, block + 32), steps(kv, block))


def steps(kv: KVTensor, block: int) -> torch.Tensor:
    k = kv.kernel_blocks
    return kv.tensor.movedim(kv.block_dim, 0)[block * k : (block + 1) * k]


def test_a_store_waits_for_the_computation_that_was_queued_before_it() -> None:
    kv = KVTensor(torch.zeros(4, 1 << 20, dtype=torch.uint8, device="cuda"))
    host = np.zeros((4, 1 << 20), np.uint8)
    with OffloadWorker([KVGroup([kv])], host) as worker:
        torch.cuda._sleep(200_000_000)
        kv.tensor.fill_(7)
        worker.submit_store(1, [2], [1])
        assert worker.get_finished() == []
        worker.wait([1])
    assert (host[1] == 7).all()


def test_a_load_waits_for_what_was_queued_on_its_blocks() -> None:
    kv = KVTensor(torch.zeros(4, 1 << 20, dtype=torch.uint8, device="cuda"))
    host = np.full((4, 1 << 20), 9, np.uint8)
    with OffloadWorker([KVGroup([kv])], host) as worker:
        torch.cuda._sleep(200_000_000)
        kv.tensor.fill_(7)
        worker.submit_load(1, [2], [1], expedited=True)
        worker.wait([1])
    assert (kv.tensor[2] == 9).all()
    assert (kv.tensor[1] == 7).all()


def test_an_expedited_load_does_not_queue_behind_stores_and_loads() -> None:
    kv = KVTensor(filled(256, 1 << 20))
    host = np.zeros((256, 1 << 20), np.uint8)
    with OffloadWorker([KVGroup([kv])], host) as worker:
        for job in range(10):
            worker.submit_load(job, range(100), range(100))
        worker.submit_load(10, [200], [200], expedited=True)
        worker.wait([10])
        assert 9 not in {result.job_id for result in worker.get_finished()}


def test_memory_that_is_not_registered_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kv = KVTensor(filled(4, 4096))
    host = np.zeros((4, 4096), np.uint8)
    with (
        OffloadWorker([KVGroup([kv])], host),
        caplog.at_level(logging.WARNING),
        # The driver refuses to register the same memory twice.
        OffloadWorker([KVGroup([kv])], host) as second,
    ):
        assert "did not register 16 KiB" in caplog.text
        # The engine's next kernel must not see that error.
        kv.tensor.add_(1)
        second.submit_store(1, [1], [1])
        second.wait([1])
        assert second.get_finished()[0].success
    assert host[1].tobytes() == kv.tensor[1].cpu().numpy().tobytes()
