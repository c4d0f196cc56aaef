"""Measure the throughput of an engine's own storages and of kvtier's storages.

Usage, in the engine's environment: python benchmarks/engine_storage.py lmcache|sglang [--mib N] ...

Each storage stores and loads one batch, with the calls that the engine's own threads make. Each
batch contains new random bytes, which are all compared after the load. After each load, the
storage's files are unlinked and dirty pages are written back, so every store begins with an idle
disk. Before a store, a file of twice the batch is written and removed. A load reads the bytes from
the page cache or, in the group "disk", from the disk. CPU time covers this process and the tiers'
processes, but not servers. Only kvtier's storages check digests.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from runner import Benchmark, Sample, must_be_equal, positive
from ways.storage import Storage
from ways.way import cpu_clock


def main() -> None:
    bench = Benchmark(__doc__, rounds=15)
    bench.option("engine", choices=("lmcache", "sglang"))
    bench.option("--mib", type=positive, default=128, help="of a batch (%(default)s)")
    options = bench.parse()
    # torch's second thread spins for milliseconds after each fill and comparison.
    torch.set_num_threads(1)
    with bench.folder() as folder, ExitStack() as stack:
        engine = import_module(f"ways.{options.engine}_storages")
        for group, storages in engine.storages(folder, options.mib << 20, stack).items():
            turns = {
                way: partial(_turn, storage, folder, f"{group}/{way}", options.mib)
                for way, storage in storages.items()
            }
            bench.measure(group, turns, warm_up=True)
    bench.finish()


def _turn(storage: Storage, base: Path, place: str, mib: int, number: int) -> Iterator[Sample]:
    stored = storage.fill()
    # Touch free pages first. After a virtual machine's host takes a page back, a write takes 10 us.
    with tempfile.TemporaryFile(dir=base) as file:
        for _ in range(mib):
            file.write(bytes(2 << 20))
    yield from _cost("store", mib, lambda: storage.store(number + 1))
    storage.wipe()
    storage.find(number + 1)
    yield from _cost("load", mib, lambda: storage.load(number + 1))
    must_be_equal(storage.holds(stored))
    storage.clear()
    for path in (base / place).rglob("*"):
        if path.is_file() and path.stat().st_size >= storage.object_bytes:
            path.unlink()
    os.sync()


def _cost(operation: str, mib: int, move: Callable[[], None]) -> Iterator[Sample]:
    cpu_s = cpu_clock()
    start_cpu_s, start_s = cpu_s(), time.perf_counter()
    move()
    wall_s, spent_cpu_s = time.perf_counter() - start_s, cpu_s() - start_cpu_s
    yield operation, "throughput", "MiB/s", mib / wall_s
    yield operation, "per CPU second", "GiB", mib / 1024 / spent_cpu_s


if __name__ == "__main__":
    main()
