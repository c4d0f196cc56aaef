"""Copies wait for the engine's stream or event, whichever thread submits them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from support.gpu.accelerator import MIB, has_device, sleep_on_stream, synchronize
from support.gpu.copies import Bytes, finish, open_worker, random_blocks
from support.gpu.figures import Figure
from support.gpu.memory import mapped

from kvtier_sdk.worker import OffloadWorker

_ASLEEP_S = 0.3


def test_streams(figure: Figure) -> None:
    side = torch.cuda.Stream() if has_device() else None
    blocks = random_blocks(4, MIB)
    host = mapped(4, MIB)
    with open_worker(blocks, host) as worker:
        for threaded in (False, True):
            for by_event in (False, True):
                for operation in ("store", "load"):
                    name = (
                        f"{operation} after {'an event' if by_event else 'a stream'}, "
                        f"{'another thread' if threaded else 'same thread'}"
                    )
                    waited = _wait(worker, blocks, host, side, operation, threaded, by_event)
                    figure(f"{name}: waited", "yes" if waited else "no")
                    assert waited, f"{name}: did not wait"


def _wait(
    worker: OffloadWorker,
    blocks: torch.Tensor,
    host: Bytes,
    side: torch.cuda.Stream | None,
    operation: str,
    threaded: bool,
    by_event: bool,
) -> bool:
    blocks.fill_(1)
    host[:] = 9
    synchronize()
    with torch.cuda.stream(side):
        sleep_on_stream(_ASLEEP_S)
        blocks.fill_(7)
    after = side.record_event() if side is not None and by_event else side
    submit = worker.submit_store if operation == "store" else worker.submit_load
    _submit(lambda: submit(1, [2], [3], after=after), threaded)
    ended = finish(worker, 1)[1]
    synchronize()
    expected = 7 if operation == "store" else 9
    written = host[3] if operation == "store" else blocks[2]
    return ended.success and bool((written == expected).all())


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
