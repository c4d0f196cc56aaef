"""Measure the throughput of several processes that share one root of the file tier.

Usage: python benchmarks/file_tier.py [--root DIR] [--rounds N] [--total SIZE] ...

Each measurement moves the same number of bytes, split among its processes. So the ratio to one
process shows the cost or the gain of sharing. Each round measures every program with every number
of processes, so that the machine's noise affects them all alike. The tables show medians over the
rounds. The programs:

    tier    FileTier, no capacity
    evict   FileTier, with a capacity of half of the bytes written, so that most stores evict
    plain   the limit: files of the same length are only written, renamed and read

MiB/s count payload and header. Each ratio is to the program's first row.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import results
from ways.file_ways import FileSubject, PlainFiles
from ways.tier_way import TierWay
from ways.way import Way, Work

from kvtier_sdk.options.units import format_bytes, parse_bytes

WAYS = ("tier", "evict", "plain")


@dataclass(frozen=True)
class Job:
    way: str
    root: str
    number: int
    chunk_bytes: int
    chunks: int
    concurrency: int
    capacity_bytes: int | None
    direct_io: str


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        _serve(Job(**json.loads(sys.argv[2])))
        return
    arguments = _arguments()
    figures: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.root) as root:
        print(
            f"{root}: {format_bytes(arguments.total)} a measurement in chunks of "
            f"{format_bytes(arguments.chunk)}, {arguments.rounds} rounds"
        )
        for number in range(arguments.rounds):
            measured = itertools.product(WAYS, arguments.processes)
            for way, processes in results.in_turns(measured, number):
                place = Path(root) / "kv"
                rates = _measure(way, processes, place, arguments)
                figures.setdefault((way, processes), []).append(rates)
                print(f"{way} {processes}: {rates[0]:.0f} MiB/s stored", file=sys.stderr)
                shutil.rmtree(place)
    object_bytes = arguments.chunk + FileSubject.header_bytes
    for which, title in enumerate(("store", "load")):
        print(
            f"\n{title:8}{'processes':>10}{'MiB/s':>10}{'least':>10}{'most':>10}{'ratio':>8}"
            f"{'chunks/s':>10}"
        )
        for way, processes in itertools.product(WAYS, arguments.processes):
            if (way, title) == ("evict", "load"):
                continue  # half of the chunks have been evicted, so loads would miss
            rates = [pair[which] for pair in figures[way, processes]]
            alone = statistics.median(pair[which] for pair in figures[way, arguments.processes[0]])
            middle = statistics.median(rates)
            print(
                f"{way:8}{processes:10}{middle:10.0f}{min(rates):10.0f}{max(rates):10.0f}"
                f"{middle / alone:8.2f}{middle * 2**20 / object_bytes:10.0f}"
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, help="a directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5, help="to take medians over (%(default)s)")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], help="1 2 4")
    parser.add_argument("--total", type=parse_bytes, default="512MiB", help="%(default)s")
    parser.add_argument("--chunk", type=parse_bytes, default="1MiB", help="%(default)s")
    parser.add_argument(
        "--concurrency", type=int, default=4, help="calls, or threads, at a time (%(default)s)"
    )
    parser.add_argument("--direct-io", choices=("auto", "on", "off"), default="auto")
    return parser.parse_args()


def _measure(
    way: str, processes: int, place: Path, arguments: argparse.Namespace
) -> tuple[float, float]:
    """Return the store rate and the load rate of all processes together, in MiB/s."""
    chunks = arguments.total // arguments.chunk // processes
    object_bytes = arguments.chunk + FileSubject.header_bytes
    capacity_bytes = processes * chunks * object_bytes // 2 if way == "evict" else None
    place.mkdir()
    workers = []
    for number in range(processes):
        job = Job(
            way,
            str(place),
            number,
            arguments.chunk,
            chunks,
            arguments.concurrency,
            capacity_bytes,
            arguments.direct_io,
        )
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(job))]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
    moved_mib = processes * chunks * object_bytes / 2**20
    rates = [moved_mib / _phase(workers) for _ in ("store", "load")]
    for worker in workers:
        worker.communicate()
        if worker.returncode:
            raise SystemExit(f"a worker ended with {worker.returncode}")
    return rates[0], rates[1]


def _phase(workers: Sequence[subprocess.Popen[str]]) -> float:
    """Start the next phase of all workers; return the seconds until the last worker has ended."""
    for worker in workers:
        if worker.stdout is None or worker.stdout.readline() != "ready\n":
            raise SystemExit("a worker did not start")
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    spans = []
    for worker in workers:
        assert worker.stdout is not None
        spans.append([float(text) for text in worker.stdout.readline().split()])
    return max(end for _, end in spans) - min(start for start, _ in spans)


# The code below runs in a worker.


def _serve(job: Job) -> None:
    work = Work(
        chunk_bytes=job.chunk_bytes,
        header_bytes=FileSubject.header_bytes,
        chunks=job.chunks,
        keys=job.chunks,
        at_a_time=job.concurrency,
    )
    start = f"{job.number:08}"
    way: Way
    if job.way == "plain":
        way = PlainFiles(work, Path(job.root), direct_io=job.direct_io, start=start)
    else:
        capacity = {"capacity": job.capacity_bytes} if job.capacity_bytes else {}
        way = TierWay(
            work,
            key_start=start.encode(),
            may_evict=job.capacity_bytes is not None,
            type="file",
            root=job.root,
            min_free=0,
            direct_io=job.direct_io,
            **capacity,
        )
    asyncio.run(_run(way))


async def _run(way: Way) -> None:
    await way.open()
    for move in (way.store, way.load):
        print("ready", flush=True)
        sys.stdin.readline()
        start_s = time.perf_counter()
        await move()
        # The parent can compare these times, because all processes share the clock of perf_counter.
        print(start_s, time.perf_counter(), flush=True)
    await way.close()


if __name__ == "__main__":
    main()
