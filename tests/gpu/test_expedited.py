"""An urgent load finishes before the 1 GiB of loads and 1 GiB of stores submitted ahead of it."""

from __future__ import annotations

import time

import torch
from support.gpu.accelerator import MIB, computing, device, has_device
from support.gpu.copies import finish, open_worker, same
from support.gpu.figures import Figure
from support.gpu.memory import mapped

from kvtier_sdk.worker import OffloadWorker

_JOBS = 8
_EXPEDITED = 99


def test_expedited(figure: Figure) -> None:
    each = 128 if has_device() else 4
    last = 2 * _JOBS * each
    blocks = torch.zeros((last + 1, MIB), dtype=torch.uint8, device=device())
    host = mapped(last + 1, MIB)
    host[last] = 9
    figure("the others: loads", _JOBS * each, "MiB")
    figure("the others: stores", _JOBS * each, "MiB")
    with open_worker(blocks, host) as worker:
        _time(figure, worker, "warming up", last, each=0, expedited=False)
        for name, others, expedited in (
            ("alone", 0, False),
            ("behind the others", each, False),
            ("expedited", each, True),
        ):
            blocks[last] = 0
            left = _time(figure, worker, name, last, each=others, expedited=expedited)
            assert same(blocks, [last], host, [last]), f"{name}: bytes differ"
    if has_device():
        assert left, "the expedited load ended last"


def _time(
    figure: Figure, worker: OffloadWorker, name: str, last: int, *, each: int, expedited: bool
) -> int:
    jobs = range(2 * _JOBS) if each else range(0)
    for job in jobs:
        submit = worker.submit_store if job % 2 else worker.submit_load
        ids = range(job * each, (job + 1) * each)
        submit(job, ids, ids, after=computing())
    began_s = time.perf_counter()
    worker.submit_load(_EXPEDITED, [last], [last], expedited=expedited, after=computing())
    ended = finish(worker, _EXPEDITED)
    figure(f"1 MiB {name}", (time.perf_counter() - began_s) * 1e3, "ms")
    left = len(jobs) + 1 - len(ended)
    ended |= finish(worker, *jobs)
    if jobs:
        figure(f"1 MiB {name}: others that had not ended", left)
        took_ms = (time.perf_counter() - began_s) * 1e3
        figure(f"1 MiB {name}: all had ended after", took_ms, "ms")
    failed = [result for result in ended.values() if not result.success]
    assert not failed, f"{name}: {failed}"
    return left
