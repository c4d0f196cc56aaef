from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from support.fake_cuda import FakeCUDA, fake_cuda
from support.gated_copies import Gate

from kvtier_sdk.worker import KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker.cpu import CPUDevice
from kvtier_sdk.worker.cuda import CUDADevice


@pytest.fixture
def gate() -> Iterator[Gate]:
    found = Gate()
    yield found
    found.open()


@pytest.fixture
def gated(gate: Gate) -> Iterator[Callable[..., OffloadWorker]]:
    """Yield a function that makes workers whose copies wait for the gate."""
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


@pytest.fixture
def runtime() -> Iterator[FakeCUDA]:
    with fake_cuda() as runtime:
        yield runtime
        assert runtime.error == 0, "the engine is told of an error that is not its own"


@pytest.fixture
def opened(runtime: FakeCUDA) -> Iterator[Callable[..., OffloadWorker]]:
    """Yield a function that makes workers whose device memory is CPU tensors."""
    workers: list[OffloadWorker] = []

    def make(kv: KVGroup | KVTensor, host: np.ndarray) -> OffloadWorker:
        group = kv if isinstance(kv, KVGroup) else KVGroup([kv])
        device = CUDADevice(torch.device("cuda:0"))
        workers.append(OffloadWorker([group], host, device=device))
        return workers[-1]

    yield make
    for worker in workers:
        worker.shutdown()
