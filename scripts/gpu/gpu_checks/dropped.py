"""A worker that is dropped without ``shutdown``, as by an engine that ends with an exception."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time

import torch

from gpu_checks.accelerator import MIB, has_device, need_device, sleep_on_stream, synchronize
from gpu_checks.copies import Bytes, finish, open_worker, random_blocks, registered, same
from gpu_checks.findings import Findings
from kvtier_sdk import HostPool

_BLOCKS = 64
_ALL = range(_BLOCKS)
#: Delay of a copy, which begins long after its worker is gone.
_ASLEEP_S = 0.3
_PATIENCE_S = 20.0


def check(findings: Findings) -> None:
    """Drop a worker during a store; then use its memory again, and memory in its place.

    Memory that is unmapped while it is registered stays known to the driver: copies to the next
    mapping at its address may go to the old pages.
    """
    blocks = random_blocks(_BLOCKS, MIB)
    address = 0
    for life in ("the memory of a dropped worker", "new memory after it"):
        with contextlib.closing(HostPool(_BLOCKS, MIB)) as pool:
            host = pool.part(0)
            if address:
                again = "the same" if host.ctypes.data == address else "another"
                findings.figure(f"{life}: address", again)
            address = host.ctypes.data
            _use(findings, blocks, host, life)
            _drop(blocks, host)
            findings.expect(_arrives(blocks, host), f"{life}: a dropped worker's store is wrong")
            _use(findings, blocks, host, f"{life}, dropped")
            del host
    # On a CPU, the interpreter may free the memory while a thread still copies.
    need_device("memory that stays registered")
    findings.expect(not _exit_status(findings, "kept"), "the process did not end well")
    # An engine that frees the memory of a running copy has no guarantee.
    _exit_status(findings, "given back")


def _exit_status(findings: Findings, memory: str) -> int:
    """End a process during a store, with its memory kept or freed before; return its status."""
    ended = subprocess.run(
        [sys.executable, "-m", "gpu_checks.dropped", memory],
        timeout=_PATIENCE_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    words = f"{ended.returncode} {ended.stdout.strip()}"
    findings.figure(f"exit status with a store under way, memory {memory}", words.rstrip())
    return ended.returncode


def _use(findings: Findings, blocks: torch.Tensor, host: Bytes, name: str) -> None:
    """Store everything with a new worker, and shut it down."""
    host[:] = 0
    with open_worker(blocks, host) as worker:
        findings.figure(f"{name}: registered", registered(worker))
        worker.submit_store(1, _ALL, _ALL)
        stored = finish(worker, 1)[1]
    findings.expect(stored.success, f"{name}: a new worker's store failed: {stored.error}")
    findings.expect(same(blocks, _ALL, host, _ALL), f"{name}: a new worker's bytes differ")


def _drop(blocks: torch.Tensor, host: Bytes) -> None:
    """Drop a worker during a store."""
    host[:] = 0
    worker = open_worker(blocks, host)
    sleep_on_stream(_ASLEEP_S)
    worker.submit_store(1, _ALL, _ALL)
    del worker
    gc.collect()


def _arrives(blocks: torch.Tensor, host: Bytes) -> bool:
    synchronize()
    deadline_s = time.monotonic() + (0 if has_device() else _PATIENCE_S)
    while not same(blocks, _ALL, host, _ALL):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def _end_with_a_store_under_way(memory: str) -> object:
    blocks = random_blocks(_BLOCKS, MIB)
    host = HostPool(_BLOCKS, MIB).part(0)
    _drop(blocks, host)
    return (blocks, host) if memory == "kept" else None


if __name__ == "__main__":
    kept = _end_with_a_store_under_way(sys.argv[1])
