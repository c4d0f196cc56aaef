"""The cost of sealing: MB/s and CPU of a tier with a codec, beside the same tier without one.

Usage: python benchmarks/sealed.py [--tiers memory file] [--runners thread process] [--rounds N] ...

Each round stores and loads the same bytes through every tier in turn, plain and sealed one after
the other, so that a noisy machine is noisy for both; the table shows medians over the rounds. MB/s
are of payload, from the hand-over to the last verdict, and CPU is that of this process and the
tier's, in milliseconds for 100 MB. A ratio is to the plain chunk.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import results

from kvtier_sdk import (
    HostPool,
    Job,
    Namespace,
    PoolLayout,
    RequestContext,
    TierClient,
    TierListener,
    Verdict,
    make_offload_key,
    open_tier,
)
from kvtier_sdk.options.units import format_bytes, parse_bytes

_REQUEST = RequestContext("bench")
_DEADLINES = "lookup_deadline=60s&load_deadline=60s&store_deadline=60s&max_queue=4GiB"
_TICKS = os.sysconf("SC_CLK_TCK")
MODES = ("plain", "sealed")
OPERATIONS = ("store", "load")


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    mb_per_s: float
    cpu_ms: float


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiers = ("memory", "file")
    parser.add_argument("--tiers", nargs="+", choices=tiers, default=tiers)
    parser.add_argument(
        "--runners", nargs="+", choices=("thread", "process"), default=["thread", "process"]
    )
    parser.add_argument("--rounds", type=int, default=7, help="to take medians over (%(default)s)")
    parser.add_argument("--total", type=parse_bytes, default="256MiB", help="%(default)s")
    parser.add_argument("--chunk", type=parse_bytes, default="1MiB", help="%(default)s")
    parser.add_argument("--root", help="a directory on the disk to measure")
    arguments = parser.parse_args()
    chunks = arguments.total // arguments.chunk
    figures: dict[tuple[str, ...], list[Figure]] = {}
    pool = HostPool.create(PoolLayout(chunks, arguments.chunk))
    try:
        for slot in range(chunks):
            pool.view(slot)[:] = os.urandom(4096) * (arguments.chunk // 4096)
        for number in range(arguments.rounds):
            ways = itertools.product(arguments.tiers, arguments.runners, MODES)
            for way in results.in_turns(ways, number):
                with tempfile.TemporaryDirectory(dir=arguments.root) as directory:
                    measured = measure(way, Path(directory), pool, chunks)
                if number or arguments.rounds == 1:  # the first one warms up
                    for operation, figure in zip(OPERATIONS, measured, strict=True):
                        figures.setdefault((operation, *way), []).append(figure)
    finally:
        pool.close()
    print(f"{format_bytes(arguments.total)} in chunks of {format_bytes(arguments.chunk)}")
    print(f"{'':31}{'MB/s':>8}{'ratio':>7}{'CPU ms/100 MB':>15}{'more':>7}")
    for key, rounds in sorted(figures.items()):
        plain = middle(figures[(*key[:3], "plain")])
        found = middle(rounds)
        print(
            f"{key[0]:7}{key[1]:8}{key[2]:9}{key[3]:7}{found.mb_per_s:8.0f}"
            f"{found.mb_per_s / plain.mb_per_s:7.2f}{found.cpu_ms:15.1f}"
            f"{found.cpu_ms - plain.cpu_ms:7.1f}"
        )


def middle(rounds: Sequence[Figure]) -> Figure:
    """The medians."""
    return Figure(
        statistics.median(figure.mb_per_s for figure in rounds),
        statistics.median(figure.cpu_ms for figure in rounds),
    )


def measure(
    way: tuple[str, ...], directory: Path, pool: HostPool, chunks: int
) -> tuple[Figure, Figure]:
    """Store and load all chunks once."""
    tier, runner, mode = way
    url = f"memory:?{_DEADLINES}&runner={runner}"
    if tier == "file":
        url = f"file://{directory}/kv?{_DEADLINES}&runner={runner}&min_free=0"
    if mode == "sealed":
        keys = directory / "chunk.keys"
        keys.touch(mode=0o600)
        keys.write_text(os.urandom(32).hex())
        url += f"&codec=aes-gcm:{keys}"
    names = [make_offload_key(slot.to_bytes(32, "big")) for slot in range(chunks)]
    with open_tier(url, pool, Namespace({"bench": 1}), TierListener()) as client:
        # The first bytes of a tier's life pay for its memory.
        warm = [make_offload_key(slot.to_bytes(33, "big")) for slot in range(chunks)]
        finish(client, client.store(warm, range(chunks), _REQUEST, whole=True), [0.0])
        finish(client, client.load(warm, range(chunks), _REQUEST, whole=True), [0.0])
        with cpu_spent(client) as store:
            finish(client, client.store(names, range(chunks), _REQUEST, whole=True), store)
        with cpu_spent(client) as load:
            finish(client, client.load(names, range(chunks), _REQUEST, whole=True), load)
    moved_mb = chunks * pool.chunk_bytes / 1e6
    return (
        Figure(moved_mb / store[0], store[1] * 1e3 / moved_mb * 100),
        Figure(moved_mb / load[0], load[1] * 1e3 / moved_mb * 100),
    )


def finish(client: TierClient, job: Job | None, spent: list[float]) -> None:
    """Hand the job over, wait for its end, and note how long it took."""
    assert job is not None
    started_s = time.perf_counter()
    client.flush()
    while job.result is None:
        time.sleep(0.0005)
        client.poll()
    spent[0] = time.perf_counter() - started_s
    if set(job.result.verdicts) != {Verdict.OK}:
        raise SystemExit(f"{job.operation.value}: {job.result.error}")


@contextmanager
def cpu_spent(client: TierClient) -> Iterator[list[float]]:
    """Seconds, to be noted by the caller, and CPU seconds of this process and its children."""
    spent = [0.0, 0.0]
    before_s = cpu_s()
    yield spent
    spent[1] = cpu_s() - before_s


def cpu_s() -> float:
    """CPU seconds of this process, and of those that it has started and that run."""
    total = time.process_time()
    own = Path("/proc/self/task")
    for thread in own.iterdir():
        for child in (thread / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / _TICKS
    return total


if __name__ == "__main__":
    main()
