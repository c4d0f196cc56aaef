"""Jobs behind a computation on the engine's own stream, submitted from two threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from gpu_checks.accelerator import MIB, has_device, need_device, sleep_on_stream, synchronize
from gpu_checks.copies import Bytes, finish, open_worker, random_blocks
from gpu_checks.findings import Findings
from kvtier_sdk.worker import OffloadWorker

#: Long enough for a thread to start and submit before the stream wakes.
_ASLEEP_S = 0.3
_COMPUTED = 7

#: Submits a job behind a computation.
_Behind: TypeAlias = Callable[[Callable[[], None]], None]


def check(findings: Findings) -> None:
    """Store and load behind a computation that has not ended.

    A worker waits for the stream that is current where a job is submitted. A thread that was not
    told of the engine's stream has its own: whether its job sees the computation is a figure, not a
    failure.
    """
    side = torch.cuda.Stream() if has_device() else None
    blocks = random_blocks(4, MIB)
    host = np.zeros((4, MIB), np.uint8)
    # In another thread; with the engine's stream current; it has to wait.
    ways: dict[str, tuple[bool, bool, bool]] = {
        "same thread": (False, True, True),
        "another thread, on the engine's stream": (True, True, True),
        "another thread, on its own stream": (True, False, False),
    }
    with open_worker(blocks, host) as worker:
        for way, (threaded, told, must_wait) in ways.items():
            behind = partial(_submit_behind, blocks, side, threaded=threaded, told=told)
            for operation in (_store, _load):
                waited = operation(worker, blocks, host, behind)
                name = f"{operation.__name__.strip('_')}, {way}"
                findings.figure(f"{name}: waited", "yes" if waited else "no")
                findings.expect(waited or not must_wait, f"{name}: did not wait")
    need_device("streams")


def _store(worker: OffloadWorker, blocks: torch.Tensor, host: Bytes, behind: _Behind) -> bool:
    """Store a block that is still being computed; return true if its result was stored."""
    blocks.fill_(1)
    host[:] = 0
    behind(lambda: worker.submit_store(1, [2], [3]))
    return _succeeded(worker, 1) and bool((host[3] == _COMPUTED).all())


def _load(worker: OffloadWorker, blocks: torch.Tensor, host: Bytes, behind: _Behind) -> bool:
    """Load into a block that is still being computed; return true if the load came last."""
    host[1] = 9
    behind(lambda: worker.submit_load(2, [2], [1]))
    return _succeeded(worker, 2) and bool((blocks[2] == 9).all())


def _submit_behind(
    blocks: torch.Tensor,
    side: torch.cuda.Stream | None,
    submit: Callable[[], None],
    *,
    threaded: bool,
    told: bool,
) -> None:
    """Queue a computation of all blocks on the engine's stream, and a job behind it."""
    synchronize()
    with torch.cuda.stream(side):
        sleep_on_stream(_ASLEEP_S)
        blocks.fill_(_COMPUTED)
        if threaded:
            _submit_in_thread(submit, side if told else None)
        else:
            submit()


def _submit_in_thread(submit: Callable[[], None], side: torch.cuda.Stream | None) -> None:
    raised: list[Exception] = []

    def work() -> None:
        try:
            with torch.cuda.stream(side):
                submit()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def _succeeded(worker: OffloadWorker, job_id: int) -> bool:
    ended = finish(worker, job_id)[job_id]
    synchronize()
    return ended.success
