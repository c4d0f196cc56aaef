"""Blocks go through a pool to a file tier, and come back through another manager's pool."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from support.gpu.accelerator import KIB, MIB, computing, has_device
from support.gpu.copies import finish, open_worker, random_blocks
from support.gpu.figures import Figure

from kvtier_sdk import (
    HostPool,
    LookupResult,
    Namespace,
    OffloadKey,
    RequestContext,
    TieringConfig,
    make_offload_key,
)
from kvtier_sdk.engine import TieringManager, open_manager, open_pool

_CHUNKS = 64
_PATIENCE_S = 20.0
_STEP_S = 0.01


def test_round_trip(figure: Figure) -> None:
    chunk_bytes = MIB if has_device() else 64 * KIB
    keys = [make_offload_key(number.to_bytes(32, "big")) for number in range(_CHUNKS)]
    for runner in ("thread", "process"):
        blocks = random_blocks(2 * _CHUNKS, chunk_bytes)
        ids = np.random.default_rng(0).permutation(_CHUNKS)
        with tempfile.TemporaryDirectory(prefix="gpu-checks-") as root:
            tier = {"type": "file", "root": root, "capacity": "1GiB", "runner": runner}
            config = TieringConfig.from_dict(
                {"slots": 2 * _CHUNKS, "chunk_bytes": chunk_bytes, "tiers": [tier]}
            )
            for name, move, first in (("down", _store, 0), ("up", _load, _CHUNKS)):
                began_s = time.perf_counter()
                with _opened(config) as engine:
                    move(engine, keys, blocks, ids + first)
                took_s = time.perf_counter() - began_s
                figure(f"file tier in a {runner}, {name}: opened to closed", took_s, "s")
        same = torch.equal(blocks[:_CHUNKS], blocks[_CHUNKS:])
        figure(f"file tier in a {runner}: bytes compared", blocks.nbytes // 2 / MIB, "MiB")
        assert same, f"file tier in a {runner}: bytes differ"


class _Engine(NamedTuple):
    pool: HostPool
    manager: TieringManager
    reported: threading.Event

    def steps(self) -> Iterator[None]:
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            yield
            self.manager.on_schedule_end()
            self.reported.wait(_STEP_S)
            self.reported.clear()
        raise TimeoutError(f"the tier is not done after {_PATIENCE_S:.0f} s")


@contextlib.contextmanager
def _opened(config: TieringConfig) -> Iterator[_Engine]:
    reported = threading.Event()
    namespace = Namespace({"engine": "gpu-checks"})
    with (
        open_pool(config) as pool,
        open_manager(pool, config, namespace, notify=reported.set) as manager,
    ):
        yield _Engine(pool, manager, reported)


def _store(
    engine: _Engine, keys: Sequence[OffloadKey], blocks: torch.Tensor, ids: np.ndarray
) -> None:
    manager, request = engine.manager, RequestContext("down")
    manager.on_new_request(request)
    output = manager.prepare_store(keys, request)
    assert output.keys_to_store == list(keys)
    with open_worker(blocks, engine.pool.part(0)) as worker:
        worker.submit_store(1, ids, output.slots, after=computing())
        assert finish(worker, 1)[1].error is None
    manager.complete_store(keys, request)
    manager.on_request_finished(request)
    for _ in engine.steps():
        if not manager.has_pending_work():
            return


def _load(
    engine: _Engine, keys: Sequence[OffloadKey], blocks: torch.Tensor, ids: np.ndarray
) -> None:
    manager, request = engine.manager, RequestContext("up")
    manager.on_new_request(request)
    for _ in engine.steps():
        found = [manager.lookup(key, request) for key in keys]
        assert LookupResult.MISS not in found
        if set(found) == {LookupResult.HIT}:
            break
    spec = manager.prepare_load(keys, request)
    with open_worker(blocks, engine.pool.part(0)) as worker:
        worker.submit_load(1, ids, spec.slots, after=computing())
        assert finish(worker, 1)[1].error is None
    manager.complete_load(keys, request)
    manager.on_request_finished(request)
