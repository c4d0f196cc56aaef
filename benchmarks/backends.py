"""Throughput of each backend, beside the obvious plain client and the limit.

Usage: python benchmarks/backends.py [--backend NAME ...] [--kib N ...] [--rounds N] ...

Starts servers of its own on the loopback. Each round measures every way in turn, so that a noisy
machine is noisy for all of them, and ratios are taken within a round. The limits:

    redis     redis-benchmark, with as many clients as the tier has connections
    file      preadv and pwritev of the same vectors into the same directory, from as many threads
    s3        the same server's objects over bare sockets, requests signed beforehand
    mooncake  the client's calls for one buffer a chunk, from as many threads

A tier is called as its runner calls it: as many batches as the others have connections, each of up
to 8 MiB. MiB/s count the payload. CPU is the client's processor time for a chunk, the system's
share included; on a busy machine it says more than wall time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

from ways.file_ways import FileSubject
from ways.mooncake_ways import MooncakeSubject
from ways.redis_ways import RedisSubject
from ways.s3_ways import S3Subject
from ways.way import OPERATIONS, Figures, Subject, Work

from kvtier_sdk.options.units import format_bytes, parse_bytes

SUBJECTS: dict[str, Callable[[Path | None], Subject]] = {
    subject.name: subject for subject in (FileSubject, RedisSubject, S3Subject, MooncakeSubject)
}
#: The figures of one way: for each round, a dictionary of both operations.
Rounds = list[dict[str, Figures]]


def main() -> None:
    """Run the rounds and print a table for each backend and length."""
    arguments = _arguments()
    for backend in arguments.backend:
        with SUBJECTS[backend](arguments.root) as subject:
            for kib in arguments.kib:
                work = _work(subject, kib * 1024, arguments)
                _print_table(subject, work, _measure(subject, work, arguments.rounds))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(SUBJECTS)
    parser.add_argument(
        "--backend",
        choices=names,
        nargs="+",
        default=names,
        metavar="NAME",
        help=f"{', '.join(names)}; all of them where none is named",
    )
    parser.add_argument(
        "--kib", type=int, nargs="+", default=[2048, 128], help="length of a chunk (2048 128)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="to take medians over (%(default)s)")
    parser.add_argument(
        "--total",
        type=parse_bytes,
        default="256MiB",
        help="moved in each measurement (%(default)s)",
    )
    parser.add_argument(
        "--at-a-time",
        type=int,
        default=4,
        help="connections, or threads, of each way (%(default)s)",
    )
    parser.add_argument("--root", type=Path, help="a directory on the disk to measure")
    return parser.parse_args()


def _work(subject: Subject, chunk_bytes: int, arguments: argparse.Namespace) -> Work:
    chunks = max(arguments.at_a_time, arguments.total // chunk_bytes)
    return Work(
        chunk_bytes=chunk_bytes,
        header_bytes=subject.header_bytes,
        chunks=chunks,
        keys=min(chunks, subject.keys or chunks),
        at_a_time=arguments.at_a_time,
    )


def _measure(subject: Subject, work: Work, rounds: int) -> dict[str, Rounds]:
    figures: dict[str, Rounds] = {}
    for _ in range(rounds):
        for way in subject.ways(work):
            figures.setdefault(way.name, []).append(way.measure())
        subject.clear()
    return figures


def _print_table(subject: Subject, work: Work, figures: dict[str, Rounds]) -> None:
    print(
        f"\n{subject.name}, chunks of {format_bytes(work.chunk_bytes)}, "
        f"{work.at_a_time} at a time, {work.chunks} a measurement, "
        f"{len(figures[subject.limit])} rounds; the limit is {subject.limit}"
    )
    print(
        f"{'':24}{'MiB/s':>8}{'least':>8}{'most':>8}{'of the':>10}{'kvtier':>10}"
        f"{'CPU us':>10}{'kvtier':>10}\n"
        f"{'':24}{'':24}{'limit':>10}{'to it':>10}{'a chunk':>10}{'to it':>10}"
    )
    kvtier = figures["kvtier"]
    for operation in OPERATIONS:
        limit = figures[subject.limit]
        for name, rounds in figures.items():
            rates = [
                work.chunks * work.chunk_bytes / 2**20 / one[operation].seconds for one in rounds
            ]
            cpu_us = statistics.median(one[operation].cpu_s for one in rounds) / work.chunks * 1e6
            print(
                f"{operation:8}{name:16}{statistics.median(rates):8.0f}{min(rates):8.0f}"
                f"{max(rates):8.0f}{_ratio(limit, rounds, operation, 'seconds'):10.2f}"
                f"{_ratio(rounds, kvtier, operation, 'seconds'):10.2f}{cpu_us:10.1f}"
                f"{_ratio(kvtier, rounds, operation, 'cpu_s'):10.2f}"
            )


def _ratio(above: Rounds, below: Rounds, operation: str, attribute: str) -> float:
    """Return the median over the rounds of one way's figure divided by another's."""
    return statistics.median(
        getattr(one[operation], attribute) / getattr(other[operation], attribute)
        for one, other in zip(above, below, strict=True)
    )


if __name__ == "__main__":
    main()
