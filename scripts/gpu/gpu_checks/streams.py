"""An engine computes on a stream of its own, and submits from one thread or another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import numpy as np
import torch

from gpu_checks.accelerator import MIB, has_device, need_device, sleep_on_stream, synchronize
from gpu_checks.copies import Bytes, finish, open_worker, random_blocks
from gpu_checks.findings import Findings
from kvtier_sdk.worker import OffloadWorker

#: Long enough for a thread to start and submit before the stream wakes.
_ASLEEP_S = 0.3


def check(findings: Findings) -> None:
    """Store and load behind a computation that has not ended.

    A worker waits for the stream that is current where a job is submitted. A thread that has not
    been told of the engine's stream has another one: whether its job sees the computation is a
    figure, and no failure.
    """
    side = torch.cuda.Stream() if has_device() else None
    blocks = random_blocks(4, MIB)
    host = np.zeros((4, MIB), np.uint8)
    ways: dict[str, tuple[bool, bool, bool]] = {
        # In another thread; with the engine's stream current; it has to wait.
        "same thread": (False, True, True),
        "another thread, on the engine's stream": (True, True, True),
        "another thread, on its own stream": (True, False, False),
    }
    with open_worker(blocks, host) as worker:
        for way, (threaded, told, must_wait) in ways.items():
            for operation in (_store, _load):
                waited = operation(worker, blocks, host, side, threaded=threaded, told=told)
                name = f"{operation.__name__.strip('_')}, {way}"
                findings.figure(f"{name}: waited", "yes" if waited else "no")
                findings.expect(waited or not must_wait, f"{name}: did not wait")
    need_device("streams")


def _store(
    worker: OffloadWorker,
    blocks: torch.Tensor,
    host: Bytes,
    side: torch.cuda.Stream | None,
    *,
    threaded: bool,
    told: bool,
) -> bool:
    """Store what is still to be computed; tell whether it was stored."""
    blocks.fill_(1)
    host[:] = 0
    synchronize()
    with torch.cuda.stream(side):
        sleep_on_stream(_ASLEEP_S)
        blocks.fill_(7)
        _submit(lambda: worker.submit_store(1, [2], [3]), side, threaded=threaded, told=told)
    ended = finish(worker, 1)[1]
    synchronize()
    return ended.success and bool((host[3] == 7).all())


def _load(
    worker: OffloadWorker,
    blocks: torch.Tensor,
    host: Bytes,
    side: torch.cuda.Stream | None,
    *,
    threaded: bool,
    told: bool,
) -> bool:
    """Load into a block that is still to be cleared; tell whether it holds what was loaded."""
    host[1] = 9
    synchronize()
    with torch.cuda.stream(side):
        sleep_on_stream(_ASLEEP_S)
        blocks.fill_(7)
        _submit(lambda: worker.submit_load(2, [2], [1]), side, threaded=threaded, told=told)
    ended = finish(worker, 2)[2]
    synchronize()
    return ended.success and bool((blocks[2] == 9).all())


def _submit(
    submit: Callable[[], None], side: torch.cuda.Stream | None, *, threaded: bool, told: bool
) -> None:
    if not threaded:
        submit()
        return
    raised: list[Exception] = []

    def work() -> None:
        try:
            with torch.cuda.stream(side) if told else contextlib.nullcontext():
                submit()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
