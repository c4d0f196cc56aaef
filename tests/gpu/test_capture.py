"""An engine polls during a graph capture, in the capturing thread or in another thread.

Some drivers refuse queries of events during a capture. A refused query could break the capture, or
make the worker report a failure while the job's copy is still running.
"""

from __future__ import annotations

import threading

import pytest
import torch
from support.gpu.accelerator import (
    CAPTURE_MODES,
    MIB,
    Runtime,
    computing,
    has_device,
    sleep_on_stream,
    synchronize,
)
from support.gpu.copies import open_worker, random_blocks
from support.gpu.figures import Figure
from support.gpu.memory import mapped

from kvtier_sdk.worker import CopyResult, OffloadWorker

_ASLEEP_S = 0.3

pytestmark = pytest.mark.skipif(not has_device(), reason="only a device captures graphs")


def test_capture(figure: Figure) -> None:
    blocks = random_blocks(4, MIB)
    host = mapped(4, MIB)
    # Launch the kernel beforehand, because its first launch loads code, which a capture forbids.
    blocks[1].fill_(3)
    synchronize()
    with open_worker(blocks, host) as worker:
        for mode in CAPTURE_MODES:
            for elsewhere in (False, True):
                _poll(figure, worker, blocks, mode, elsewhere)


def _poll(
    figure: Figure, worker: OffloadWorker, blocks: torch.Tensor, mode: str, elsewhere: bool
) -> None:
    name = f"{mode}, polled by {'another thread' if elsewhere else 'the thread that captures'}"
    runtime = Runtime()
    side = torch.cuda.Stream()
    sleep_on_stream(_ASLEEP_S)
    worker.submit_store(1, [0], [0], after=computing())
    seen: list[CopyResult] = []

    def poll() -> None:
        seen.extend(worker.get_finished())

    begun = runtime.begin_capture(side, CAPTURE_MODES[mode])
    assert not begun, f"{name}: the capture did not begin: {runtime.describe(begun)}"
    with torch.cuda.stream(side):
        blocks[1].fill_(3)
    if elsewhere:
        thread = threading.Thread(target=poll)
        thread.start()
        thread.join()
    else:
        poll()
    status = runtime.end_capture(side)
    early = len(seen)
    synchronize()
    poll()
    figure(f"{name}: capture", runtime.describe(status))
    figure(f"{name}: store", ", ".join(result.error or "copied" for result in seen))
    assert not status, f"{name}: the capture is lost"
    assert not early, f"{name}: a store that was under way was reported"
    assert [result.success for result in seen] == [True], name
