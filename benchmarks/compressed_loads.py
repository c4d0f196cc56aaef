"""Measure loads with each value of option ``compress``, over a link of a chosen speed.

Usage: python benchmarks/compressed_loads.py KV [--link 8gbit] [--backend NAME ...] [--rounds N]

KV is a directory that benchmarks/kv_sample.py has written. Its bfloat16 is divided into chunks.
With --link, the loopback gets that rate: the benchmark runs in a network of its own, which takes
root and ``tc``. All sides keep their tiers open; each stores all chunks, loads them, compares them
and deletes them, once a round. CPU is that of the client, per chunk.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from pathlib import Path

from runner import Benchmark, Sample, positive
from support.redis_server import Server
from support.s3_server import S3Server
from ways.engine_way import EngineWay
from ways.way import Work

from kvtier_sdk import format_bytes

_OPTIONS = ("auto", "never", "always")
_LINKED = "KVTIER_BENCH_LINK"


def main() -> None:
    bench = Benchmark(__doc__, rounds=7)
    bench.option("kv", type=Path)
    bench.option("--link", metavar="RATE", help="of the loopback, as tc writes it: 8gbit")
    backends = ["redis", "s3", "file"]
    bench.option("--backend", choices=backends, nargs="+", default=backends)
    bench.option("--kib", type=positive, nargs="+", default=[2048], help="of a chunk")
    bench.option("--chunks", type=positive, default=64)
    bench.option("--at-a-time", type=positive, default=4, help="jobs of the engine")
    options = bench.parse()
    if options.link and _LINKED not in os.environ:
        _run_behind_link(options.link)
    for backend in options.backend:
        for kib in options.kib:
            work = Work(kib * 1024, 64, options.chunks, options.chunks, options.at_a_time)
            work.values[:] = islice(_objects(options.kv, work), work.keys)
            with ExitStack() as opened:
                url = _start(backend, options.root, opened)
                sides = {}
                for name in _OPTIONS:
                    way = EngineWay(work, url=url, compress=name)
                    asyncio.run(way.open())
                    opened.callback(lambda way=way: asyncio.run(way.close()))
                    sides[name] = partial(_round, way)
                # In the first round the gate learns.
                where = f", {options.link}" if options.link else ""
                bench.measure(f"{backend}, {format_bytes(kib * 1024)}{where}", sides, warm_up=True)
    bench.finish()


def _run_behind_link(rate: str) -> None:
    """Run this program again in a network whose loopback has this rate."""
    shape = f"tc qdisc add dev lo root tbf rate {shlex.quote(rate)} burst 2mb latency 100ms"
    again = shlex.join([sys.executable, *sys.argv])
    os.environ[_LINKED] = rate
    os.execvp(
        "unshare", ["unshare", "-n", "sh", "-ec", f"ip link set lo up; {shape}; exec {again}"]
    )


def _objects(kv: Path, work: Work) -> Iterator[bytes]:
    content = b"".join(path.read_bytes() for path in sorted((kv / "bfloat16").iterdir()))
    starts = range(0, len(content) - work.chunk_bytes + 1, work.chunk_bytes)
    for start in cycle(starts):
        yield bytes(work.header_bytes) + content[start : start + work.chunk_bytes]


def _start(backend: str, root: Path, opened: ExitStack) -> str:
    directory = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=root)))
    if backend == "file":
        return f"file://{directory}"
    if backend == "s3":
        return opened.enter_context(S3Server(directory)).url
    server = Server(directory)
    server.start()
    opened.callback(server.kill)
    return server.url


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
