"""Measure loads with each value of option ``compress``, over a link of a chosen speed.

Usage: python benchmarks/compressed_loads.py [--link 8gbit] [--backend NAME ...] [--rounds N]

Chunks are normally distributed random numbers in bfloat16, which compress as well as a model's KV.
--link sets the rate of the loopback in a separate network namespace, and needs root and ``tc``.
Each value of ``compress`` has a tier of its own, which stays open between rounds. In each round,
every tier stores, loads and deletes all chunks, and the loaded bytes are compared. CPU is the
client's processor time per chunk.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import numpy as np
from runner import Benchmark, Sample, positive
from ways.engine_way import EngineWay
from ways.way import Work, open_subject

from kvtier_sdk import format_bytes

_OPTIONS = ("auto", "never", "always")
_LINKED = "KVTIER_BENCH_LINK"


def main() -> None:
    bench = Benchmark(__doc__, rounds=7)
    bench.option("--link", metavar="RATE", help="of the loopback, as tc writes it: 8gbit")
    backends = ["redis", "s3", "file"]
    bench.option("--backend", choices=backends, nargs="+", default=backends)
    bench.option("--kib", type=positive, nargs="+", default=[2048], help="of a chunk")
    bench.option("--chunks", type=positive, default=64)
    options = bench.parse()
    if options.link and _LINKED not in os.environ:
        _run_behind_link(options.link)
    where = f", {options.link}" if options.link else ""
    for backend in options.backend:
        for kib in options.kib:
            work = Work(kib * 1024, 64, options.chunks, options.chunks, at_a_time=4)
            work.values[:] = _objects(work)
            with open_subject(backend, options.root) as subject, ExitStack() as opened:
                sides = {}
                for name in _OPTIONS:
                    way = EngineWay(work, url=subject.url, compress=name)
                    asyncio.run(way.open())
                    opened.callback(lambda way=way: asyncio.run(way.close()))
                    sides[name] = partial(_round, way)
                # Drop the warm-up round, in which kvtier learns whether compression saves time.
                bench.measure(f"{backend}, {format_bytes(kib * 1024)}{where}", sides, warm_up=True)
    bench.finish()


def _run_behind_link(rate: str) -> None:
    """Run this program again in a network namespace whose loopback has this rate."""
    shape = f"tc qdisc add dev lo root tbf rate {shlex.quote(rate)} burst 2mb latency 100ms"
    again = shlex.join([sys.executable, *sys.argv])
    os.environ[_LINKED] = rate
    os.execvp(
        "unshare", ["unshare", "-n", "sh", "-ec", f"ip link set lo up; {shape}; exec {again}"]
    )


def _objects(work: Work) -> Iterator[bytes]:
    numbers = np.random.default_rng()
    for _ in range(work.keys):
        drawn = numbers.standard_normal(work.chunk_bytes // 2, np.float32).view(np.uint32)
        # The upper half of a float32 is a bfloat16.
        yield bytes(work.header_bytes) + (drawn >> 16).astype(np.uint16).tobytes()


def _round(way: EngineWay, number: int) -> Iterator[Sample]:
    work = way.work
    work.fill()
    for operation, move in (("store", way.store), ("load", way.load)):
        taken_s, taken_cpu_s = asyncio.run(way.cost(move))
        yield operation, "throughput", "MiB/s", work.chunks * work.chunk_bytes / 2**20 / taken_s
        yield operation, "CPU a chunk", "us", taken_cpu_s / work.chunks * 1e6
        if operation == "store":
            work.wipe()
    asyncio.run(way.check())
    way.delete()


if __name__ == "__main__":
    main()
