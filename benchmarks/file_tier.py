"""Measure the throughput of several processes that share one root of the file tier.

Usage: python benchmarks/file_tier.py [--root DIR] [--rounds N] [--total SIZE] ...

Each measurement moves the same number of bytes, split among its processes. Each round measures
every program with every number of processes. A row's ratio is the throughput of the first row
(``tier`` in one process) divided by the row's throughput. The programs:

    tier    FileTier, no capacity
    evict   FileTier, with a capacity of half of the bytes written, so that most stores evict
    plain   the limit: files of the same length are only written, renamed and read

MiB/s count payload and header.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import shutil
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

from runner import Benchmark, Sample, freeze, positive
from ways.file_ways import FileSubject, PlainFiles
from ways.tier_way import TierWay
from ways.way import Way, Work

from kvtier_sdk.options.units import parse_bytes

WAYS = ("tier", "evict", "plain")


def main() -> None:
    bench = Benchmark(__doc__, rounds=5)
    bench.option("--processes", type=positive, nargs="+", default=[1, 2, 4], help="1 2 4")
    bench.option("--total", type=parse_bytes, default="512MiB", help="%(default)s")
    bench.option("--chunk", type=parse_bytes, default="1MiB", help="%(default)s")
    options = bench.parse()
    with bench.folder() as folder:
        sides = {
            f"{way}, {processes}": partial(_turn, way, processes, folder / "kv", options)
            for way, processes in itertools.product(WAYS, options.processes)
        }
        bench.measure("processes at one root", sides)
    bench.finish()


def _turn(
    way: str, processes: int, root: Path, options: argparse.Namespace, number: int
) -> Iterator[Sample]:
    chunks = options.total // options.chunk // processes
    context = multiprocessing.get_context("spawn")
    together = context.Barrier(processes)
    work = partial(_work, way, root, options.chunk, chunks, processes)
    root.mkdir()
    with ProcessPoolExecutor(processes, context, _begin, (together,)) as workers:
        spans = zip(*workers.map(work, range(processes)), strict=True)
    shutil.rmtree(root)
    moved_mib = processes * chunks * (FileSubject.header_bytes + options.chunk) / 2**20
    for operation, of_workers in zip(("store", "load"), spans, strict=False):
        starts_s, ends_s = zip(*of_workers, strict=True)
        yield operation, "throughput", "MiB/s", moved_mib / (max(ends_s) - min(starts_s))


# The code below runs in a worker.


def _begin(barrier: Barrier) -> None:
    global _together
    _together = barrier


def _work(
    way: str, root: Path, chunk_bytes: int, chunks: int, processes: int, number: int
) -> list[tuple[float, float]]:
    work = Work(chunk_bytes, FileSubject.header_bytes, chunks, chunks, at_a_time=4)
    start, is_full = f"{number:08}", way == "evict"
    files: Way
    if way == "plain":
        files = PlainFiles(work, root, start=start)
    else:
        capacity = {"capacity": processes * chunks * work.object_bytes // 2} if is_full else {}
        tier = {"type": "file", "root": str(root), "min_free": 0, **capacity}
        files = TierWay(work, key_start=start.encode(), may_evict=is_full, **tier)
    try:
        # A full tier has evicted half of the chunks, so loads would miss.
        return asyncio.run(_spans(files, is_loaded=not is_full))
    except BaseException:
        traceback.print_exc()
        # The other workers wait for this one. End it, so that the executor ends them too.
        os._exit(1)


async def _spans(way: Way, *, is_loaded: bool) -> list[tuple[float, float]]:
    """Return the start and end times of the stores and loads, on a clock shared by all workers."""
    spans = []
    await way.open()
    # A garbage collection in the worker that holds the root's lock would stop all workers.
    freeze()
    for move in (way.store, way.load) if is_loaded else (way.store,):
        _together.wait()
        start_s = time.perf_counter()
        await move()
        spans.append((start_s, time.perf_counter()))
    _together.wait()
    await way.close()
    return spans


if __name__ == "__main__":
    main()
