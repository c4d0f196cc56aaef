"""Submitting copies that cannot begin yet does not block the engine's thread."""

from __future__ import annotations

import time

import numpy as np
import torch
from support.gpu.accelerator import computing, has_device, sleep_on_stream
from support.gpu.copies import finish, open_worker, random_blocks, run_by_run, same
from support.gpu.figures import Figure
from support.gpu.memory import mapped

from kvtier_sdk.worker import KVGroup, KVTensor, OffloadWorker

_RUNS = 131_072
_LAYERS = 32
_POLLS = 100
_ASLEEP_S = 2.0


def test_submission(figure: Figure) -> None:
    page_bytes = 2048 if has_device() else 64
    blocks = random_blocks(2 * _RUNS, page_bytes)
    host = mapped(2 * _RUNS, page_bytes)
    chooser = np.random.default_rng(0)
    # Adjacent blocks would be copied as one, so use every second block in random order.
    ids, slots = 2 * chooser.permutation(_RUNS), 2 * chooser.permutation(_RUNS)
    with open_worker(blocks, host) as worker:
        # Warm up, because the driver's first copies may wait for the device.
        worker.submit_store(1, ids[:1], slots[:1], after=computing())
        worker.submit_load(2, ids[1:2], slots[1:2], after=computing())
        finish(worker, 1, 2)
        for operation in ("store", "load"):
            _submit(figure, worker, operation, ids, slots, operation)
            assert same(blocks, ids, host, slots), f"{operation}: bytes differ"
            # Without this change, a load that copies nothing would pass.
            host[slots] += 1
        if has_device():
            with run_by_run(worker):
                _submit(figure, worker, "load", ids, slots, "load, run by run", may_wait=True)
            assert same(blocks, ids, host, slots), "load, run by run: bytes differ"
    _check_layers(figure, page_bytes)


def _check_layers(figure: Figure, page_bytes: int) -> None:
    pages = _RUNS // _LAYERS
    layers = [random_blocks(2 * pages, page_bytes) for _ in range(_LAYERS)]
    host = mapped(2 * pages, _LAYERS * page_bytes)
    chooser = np.random.default_rng(0)
    ids, slots = 2 * chooser.permutation(pages), 2 * chooser.permutation(pages)
    with OffloadWorker([KVGroup([KVTensor(layer) for layer in layers])], host) as worker:
        for operation in ("store", "load"):
            _submit(figure, worker, operation, ids, slots, f"{operation}, 32 layers")
            for number, layer in enumerate(layers):
                part = host[:, number * page_bytes : (number + 1) * page_bytes]
                assert same(layer, ids, part, slots), f"{operation}: bytes differ"
            host[slots] += 1


def _submit(
    figure: Figure,
    worker: OffloadWorker,
    operation: str,
    ids: np.ndarray,
    slots: np.ndarray,
    name: str,
    *,
    may_wait: bool = False,
) -> None:
    awake = torch.cuda.Event() if has_device() else None
    sleep_on_stream(_ASLEEP_S)
    if awake is not None:
        awake.record()
    submit = worker.submit_store if operation == "store" else worker.submit_load
    began_s = time.perf_counter()
    submit(1, ids, slots, after=computing())
    figure(f"{name}: submitted in", (time.perf_counter() - began_s) * 1e3, "ms")
    asleep = awake is None or not awake.query()
    figure(f"{name}: back before the stream woke", "yes" if asleep else "no")
    polls_s, ended = [], []
    for _ in range(_POLLS):
        began_s = time.perf_counter()
        ended += worker.get_finished()
        polls_s.append(time.perf_counter() - began_s)
    figure(f"{name}: poll, median", float(np.median(polls_s)) * 1e3, "ms")
    figure(f"{name}: poll, longest", max(polls_s) * 1e3, "ms")
    ended += finish(worker, 1).values()
    assert [result.success for result in ended] == [True], f"{name}: reported as {ended}"
    figure(f"{name}: copied in", ended[0].duration_s * 1e3, "ms")
    if not may_wait:
        assert asleep, f"{name}: the submission waited for the stream"
