"""Small KV tensors, and copies that stop at a gate until a test opens it."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch

from kvtier_sdk.worker import KVTensor, OffloadWorker
from kvtier_sdk.worker.cpu import copy_runs

PATIENCE_S = 30.0
GRACE_S = 0.02


class Gate:
    def __init__(self) -> None:
        self.began: list[int] = []  # the number of bytes of each call, in order
        # A call with one of these numbers of bytes passes the gate, and then fails.
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


def expect_success(worker: OffloadWorker, *job_ids: int) -> None:
    worker.wait(job_ids)
    ended = {result.job_id: result.error for result in worker.get_finished()}
    assert ended == dict.fromkeys(job_ids)


def error_of(worker: OffloadWorker, job_id: int) -> str:
    worker.wait([job_id])
    (result,) = worker.get_finished()
    return str(result.error)


def until_finished(worker: OffloadWorker, jobs: int) -> None:
    """Poll until ``jobs`` jobs have finished; do not call ``wait``, which copies in this thread."""
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
