"""What one, two and four processes store and load through the file tier below one root.

Usage: python tests/bench/file_tier.py [--root DIR] [--rounds N] [--total SIZE] ...

All processes of a measurement together move the same bytes, however many they are, so that the
ratio to one process is the price, or the gain, of sharing. Each round measures every way and every
number of processes in turn, so that a noisy machine is noisy for all of them; the tables show
medians over the rounds. The ways:

    tier    FileTier, no capacity
    evict   FileTier, with a capacity of half of what is written: most stores evict
    plain   the limit: files of the same length written, renamed and read with nothing else done

MiB/s are of payload and header together; a ratio is to one process of the same way.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import json
import logging
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtier_file import FileTier
from kvtier_sdk import (
    Namespace,
    RequestContext,
    SystemClock,
    TierContext,
    TierSpec,
    Transfer,
    format_bytes,
)
from kvtier_sdk.units import parse_bytes

WAYS = ("tier", "evict", "plain")
_HEADER_BYTES = 4096
_REQUEST = RequestContext("bench")


@dataclass(frozen=True)
class Work:
    """One process's share of a measurement."""

    way: str
    root: str
    number: int
    chunk_bytes: int
    chunks: int
    batch_chunks: int
    concurrency: int
    capacity_bytes: int | None
    direct_io: str


def main() -> None:
    """Run the rounds and print the tables."""
    if sys.argv[1:2] == ["--worker"]:
        _serve(Work(**json.loads(sys.argv[2])))
        return
    arguments = _arguments()
    figures: dict[tuple[str, int], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.root) as root:
        print(
            f"{root}: {format_bytes(arguments.total)} a measurement in chunks of "
            f"{format_bytes(arguments.chunk)}, {arguments.concurrency} batches of "
            f"{arguments.batch} at a time in each process, {arguments.rounds} rounds"
        )
        for _ in range(arguments.rounds):
            for way, processes in itertools.product(WAYS, arguments.processes):
                place = Path(root) / "kv"
                rates = _measure(way, processes, place, arguments)
                figures.setdefault((way, processes), []).append(rates)
                print(f"{way} {processes}: {rates[0]:.0f} MiB/s stored", file=sys.stderr)
                shutil.rmtree(place)
    for which, title in enumerate(("store", "load")):
        print(f"\n{title:8}{'processes':>10}{'MiB/s':>10}{'least':>10}{'most':>10}{'ratio':>8}")
        for way, processes in itertools.product(WAYS, arguments.processes):
            if (way, title) == ("evict", "load"):
                continue  # half of it is gone by design
            rates = [pair[which] for pair in figures[way, processes]]
            alone = statistics.median(pair[which] for pair in figures[way, arguments.processes[0]])
            middle = statistics.median(rates)
            print(
                f"{way:8}{processes:10}{middle:10.0f}{min(rates):10.0f}{max(rates):10.0f}"
                f"{middle / alone:8.2f}"
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
    parser.add_argument("--batch", type=int, default=8, help="chunks a call (%(default)s)")
    parser.add_argument("--concurrency", type=int, default=4, help="calls at a time (%(default)s)")
    parser.add_argument("--direct-io", choices=("auto", "on", "off"), default="auto")
    return parser.parse_args()


def _measure(
    way: str, processes: int, place: Path, arguments: argparse.Namespace
) -> tuple[float, float]:
    """MiB/s stored and loaded, by all processes together."""
    chunks = arguments.total // arguments.chunk // processes
    object_bytes = arguments.chunk + _HEADER_BYTES
    capacity_bytes = processes * chunks * object_bytes // 2 if way == "evict" else None
    place.mkdir()
    workers = []
    for number in range(processes):
        work = Work(
            way,
            str(place),
            number,
            arguments.chunk,
            chunks,
            arguments.batch,
            arguments.concurrency,
            capacity_bytes,
            arguments.direct_io,
        )
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(work))]
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
    """Seconds from the first start to the last end of one phase."""
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


# In a worker.


def _serve(work: Work) -> None:
    serve = _plain if work.way == "plain" else _tier
    asyncio.run(serve(work))


async def _timed(move: Callable[[], Awaitable[None]]) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    start_s = time.perf_counter()
    await move()
    # One clock for all processes of the machine.
    print(start_s, time.perf_counter(), flush=True)


def _keys(work: Work) -> list[bytes]:
    return [b"%08d%012d" % (work.number, index) for index in range(work.chunks)]


def _buffers(work: Work) -> tuple[memoryview, memoryview]:
    memory = mmap.mmap(-1, _HEADER_BYTES + work.chunk_bytes)
    memory.write(os.urandom(len(memory)))
    view = memoryview(memory)
    return view[:_HEADER_BYTES], view[_HEADER_BYTES:]


async def _tier(work: Work) -> None:
    options = {"capacity": work.capacity_bytes} if work.capacity_bytes else {}
    spec = TierSpec.from_options(
        {
            "type": "file",
            "root": work.root,
            "min_free": 0,
            "direct_io": work.direct_io,
            **options,
        }
    )
    context = TierContext(
        name="file",
        namespace=Namespace({"bench": 1}),
        chunk_bytes=work.chunk_bytes,
        header_bytes=_HEADER_BYTES,
        payload_bytes=work.chunk_bytes,
        clock=SystemClock(),
        logger=logging.getLogger("bench"),
        report_removed=lambda keys: None,
    )
    tier = FileTier(spec.config, context)
    await tier.open()
    memory = [_buffers(work) for _ in range(work.concurrency)]
    keys = _keys(work)

    async def move(call: Callable[[Sequence[Transfer]], Awaitable[Sequence[object]]]) -> None:
        starts = iter(range(0, len(keys), work.batch_chunks))

        async def lane(buffers: tuple[memoryview, memoryview]) -> None:
            for start in starts:
                batch = keys[start : start + work.batch_chunks]
                verdicts = await call([Transfer(key, _REQUEST, *buffers) for key in batch])
                if work.capacity_bytes is None and any(verdicts):
                    raise SystemExit(f"failed: {verdicts}")

        await asyncio.gather(*map(lane, memory))

    await _timed(lambda: move(tier.store))
    await _timed(lambda: move(tier.load))
    await tier.close()


async def _plain(work: Work) -> None:
    names = [f"{work.root}/{key.hex()}" for key in _keys(work)]
    memory = [_buffers(work) for _ in range(work.concurrency)]
    direct = 0 if work.direct_io == "off" else os.O_DIRECT

    def store(name: str, buffers: tuple[memoryview, memoryview]) -> None:
        fd = _open(f"{name}.tmp", os.O_WRONLY | os.O_CREAT, direct)
        os.pwritev(fd, buffers, 0)
        os.close(fd)
        os.rename(f"{name}.tmp", name)

    def load(name: str, buffers: tuple[memoryview, memoryview]) -> None:
        fd = _open(name, os.O_RDONLY, direct)
        os.preadv(fd, buffers, 0)
        os.close(fd)

    async def move(call: Callable[[str, tuple[memoryview, memoryview]], None]) -> None:
        rest = iter(names)

        def lane(buffers: tuple[memoryview, memoryview]) -> None:
            for name in rest:
                call(name, buffers)

        with ThreadPoolExecutor(work.concurrency) as threads:
            list(threads.map(lane, memory))

    await _timed(lambda: move(store))
    await _timed(lambda: move(load))


def _open(name: str, flags: int, direct: int) -> int:
    fd = os.open(name, flags, 0o600)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, direct)
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, 0)
    return fd


if __name__ == "__main__":
    main()
