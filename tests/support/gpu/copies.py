from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier_sdk.worker import CopyResult, KVGroup, KVTensor, OffloadWorker
from support.gpu.accelerator import device, has_device

Bytes: TypeAlias = NDArray[np.uint8]
Indices: TypeAlias = Sequence[int] | NDArray[np.integer]


def random_blocks(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device())


def open_worker(blocks: torch.Tensor, host: Bytes) -> OffloadWorker:
    return OffloadWorker([KVGroup([KVTensor(blocks)])], host)


def finish(worker: OffloadWorker, *job_ids: int) -> dict[int, CopyResult]:
    worker.wait(job_ids)
    return {result.job_id: result for result in worker.get_finished()}


def same(blocks: torch.Tensor, block_ids: Indices, host: Bytes, slots: Indices) -> bool:
    chosen = torch.as_tensor(np.asarray(block_ids), device=blocks.device)
    return bool(np.array_equal(blocks[chosen].cpu().numpy(), host[np.asarray(slots)]))


@contextlib.contextmanager
def run_by_run(worker: OffloadWorker) -> Iterator[None]:
    """Make a worker copy each run of bytes separately."""
    driver = getattr(worker._device, "driver", None)
    if driver is None:
        yield
        return
    driver.copy_batch = driver.copy_each
    try:
        yield
    finally:
        del driver.copy_batch


def registered(worker: OffloadWorker) -> str:
    if not has_device():
        return "no device"
    registration = getattr(worker._device, "_registration", None)
    return "no" if registration is None else f"yes, pieces: {len(registration._held)}"
