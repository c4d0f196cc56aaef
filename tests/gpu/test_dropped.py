"""An engine drops a worker without ``shutdown``, for example after an exception."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading

import torch
from support.gpu.accelerator import MIB, computing, sleep_on_stream
from support.gpu.copies import Bytes, finish, open_worker, random_blocks, registered, same
from support.gpu.figures import Figure

from kvtier_sdk import HostPool
from kvtier_sdk.worker import registration

_BLOCKS = 64
_ALL = range(_BLOCKS)
_ASLEEP_S = 0.3
_PATIENCE_S = 20.0


def test_dropped(figure: Figure) -> None:
    """A dropped worker keeps its memory until its copies have ended, and then unregisters it.

    If freed memory stayed registered, the driver would keep its pages. Copies to new memory at the
    same address could then go to the old pages.
    """
    blocks = random_blocks(_BLOCKS, MIB)
    address = 0
    for life in ("the memory of a dropped worker", "new memory after it"):
        with contextlib.closing(HostPool(_BLOCKS, MIB)) as pool:
            host = pool.part(0)
            if address:
                again = "the same" if host.ctypes.data == address else "another"
                figure(f"{life}: address", again)
            address = host.ctypes.data
            _use(figure, blocks, host, life)
            _drop(blocks, host)
            assert _has_ended(), f"{life}: a dropped worker does not end"
            right = same(blocks, _ALL, host, _ALL)
            assert right, f"{life}: a dropped worker's store is wrong"
            assert not registration._pieces, f"{life}: a dropped worker's is registered"
            _use(figure, blocks, host, f"{life}, dropped")
            del host
    for memory in ("kept", "given back"):
        assert not _exit_status(figure, memory), f"memory {memory}: did not end well"


def _exit_status(figure: Figure, memory: str) -> int:
    ended = subprocess.run(
        [sys.executable, __file__, memory],
        timeout=_PATIENCE_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    words = f"{ended.returncode} {ended.stdout.strip()}"
    figure(f"exit status with a store under way, memory {memory}", words.rstrip())
    return ended.returncode


def _use(figure: Figure, blocks: torch.Tensor, host: Bytes, name: str) -> None:
    host[:] = 0
    with open_worker(blocks, host) as worker:
        figure(f"{name}: registered", registered(worker))
        worker.submit_store(1, _ALL, _ALL, after=computing())
        stored = finish(worker, 1)[1]
    assert stored.success, f"{name}: a new worker's store failed: {stored.error}"
    assert same(blocks, _ALL, host, _ALL), f"{name}: a new worker's bytes differ"


def _drop(blocks: torch.Tensor, host: Bytes) -> None:
    host[:] = 0
    worker = open_worker(blocks, host)
    sleep_on_stream(_ASLEEP_S)
    worker.submit_store(1, _ALL, _ALL, after=computing())
    del worker
    gc.collect()


def _has_ended() -> bool:
    for thread in threading.enumerate():
        if thread.name == "kvtier-dropped-worker":
            thread.join(_PATIENCE_S)
            return not thread.is_alive()
    return True


def _end_with_a_store_under_way(memory: str) -> object:
    blocks = random_blocks(_BLOCKS, MIB)
    host = HostPool(_BLOCKS, MIB).part(0)
    _drop(blocks, host)
    return (blocks, host) if memory == "kept" else None


if __name__ == "__main__":
    kept = _end_with_a_store_under_way(sys.argv[1])
