"""An engine computes on a stream of its own, and submits from one thread or another."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from support.gpu.accelerator import MIB, has_device, sleep_on_stream, synchronize
from support.gpu.copies import Bytes, finish, open_worker, random_blocks
from support.gpu.figures import Figure

from kvtier_sdk.worker import OffloadWorker

#: Long enough for a thread to start and submit before the stream wakes.
_ASLEEP_S = 0.3


def test_streams(figure: Figure) -> None:
    """Store and load behind a computation that has not ended, from this thread and another.

    The other thread has another current stream than the engine's, which makes no difference.
    """
    side = torch.cuda.Stream() if has_device() else None
    blocks = random_blocks(4, MIB)
    host = np.zeros((4, MIB), np.uint8)
    with open_worker(blocks, host) as worker:
        for threaded in (False, True):
            for by_event in (False, True):
                for operation in (_store, _load):
                    waited = operation(worker, blocks, host, side, threaded, by_event)
                    name = (
                        f"{operation.__name__.strip('_')} after "
                        f"{'an event' if by_event else 'a stream'}, "
                        f"{'another thread' if threaded else 'same thread'}"
                    )
                    figure(f"{name}: waited", "yes" if waited else "no")
                    assert waited, f"{name}: did not wait"


def _store(
    worker: OffloadWorker,
    blocks: torch.Tensor,
    host: Bytes,
    side: torch.cuda.Stream | None,
    threaded: bool,
    by_event: bool,
) -> bool:
    """Store what is still to be computed; tell whether it was stored."""
    blocks.fill_(1)
    host[:] = 0
    synchronize()
    with torch.cuda.stream(side):
        sleep_on_stream(_ASLEEP_S)
        blocks.fill_(7)
    after = _after(side, by_event)
    _submit(lambda: worker.submit_store(1, [2], [3], after=after), threaded)
    ended = finish(worker, 1)[1]
    synchronize()
    return ended.success and bool((host[3] == 7).all())


def _load(
    worker: OffloadWorker,
    blocks: torch.Tensor,
    host: Bytes,
    side: torch.cuda.Stream | None,
    threaded: bool,
    by_event: bool,
) -> bool:
    """Load into a block that is still to be cleared; tell whether it holds what was loaded."""
    host[1] = 9
    synchronize()
    with torch.cuda.stream(side):
        sleep_on_stream(_ASLEEP_S)
        blocks.fill_(7)
    after = _after(side, by_event)
    _submit(lambda: worker.submit_load(2, [2], [1], after=after), threaded)
    ended = finish(worker, 2)[2]
    synchronize()
    return ended.success and bool((blocks[2] == 9).all())


def _after(
    side: torch.cuda.Stream | None, by_event: bool
) -> torch.cuda.Stream | torch.cuda.Event | None:
    return side.record_event() if side is not None and by_event else side


def _submit(submit: Callable[[], None], threaded: bool) -> None:
    if not threaded:
        submit()
        return
    raised: list[Exception] = []

    def work() -> None:
        try:
            submit()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
