"""Throughput of each backend, beside the obvious plain client and the limit.

Usage: python benchmarks/backends.py [--backend NAME ...] [--kib N ...] [--rounds N] ...

Starts servers of its own on the loopback. Each round measures every way in turn, so that a noisy
machine is noisy for all of them, and ratios are taken within a round. The limits:

    redis     redis-benchmark, with as many clients as the tier has connections
    file      preadv and pwritev of the same vectors into the same directory, from as many threads
    s3        the same server's objects over bare sockets, requests signed beforehand
    mooncake  the client's calls for one buffer a chunk, from as many threads

A tier is called as its runner calls it: as many batches as the others have connections, each of up
to 8 MiB. The file tier is measured twice: alone, and as an engine uses it, in its process and with
digests on. Peers of files that are not installed are left out: vLLM's C extension needs vLLM's
environment. MiB/s count the payload. CPU is the client's processor time for a chunk, the system's
share included; on a busy machine it says more than wall time.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import results
from results import Series
from ways.way import OPERATIONS, Figures, Subject, Work

from kvtier_sdk.options.units import format_bytes, parse_bytes

#: Each in the module ``ways.<name>_ways``, imported only if it is measured: it needs its peers.
SUBJECTS = {
    "file": "FileSubject",
    "redis": "RedisSubject",
    "s3": "S3Subject",
    "mooncake": "MooncakeSubject",
}
#: The figures of one way: for each round, a dictionary of both operations.
Rounds = list[dict[str, Figures]]


def main() -> None:
    """Run the rounds and print a table for each backend and length."""
    arguments = _arguments()
    measured: list[Series] = []
    for backend in arguments.backend:
        make_subject = getattr(import_module(f"ways.{backend}_ways"), SUBJECTS[backend])
        with make_subject(arguments.root, **_of_files(arguments)) as subject:
            for kib in arguments.kib:
                work = _work(subject, kib * 1024, arguments)
                if arguments.full:
                    _measure(subject, work, 1)
                series = _series(subject, work, _measure(subject, work, arguments.rounds))
                _print_table(subject, work, series)
                measured += series
    results.write(arguments.json, measured, root=arguments.root)


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
    parser.add_argument(
        "--keep",
        action="store_true",
        help="file: remove nothing between the rounds; ext4 makes files slowly for a minute after "
        "many were removed",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="file: there is room for the chunks of one round, and each store removes another",
    )
    parser.add_argument("--root", type=Path, help="a directory on the disk to measure")
    results.add_option(parser)
    return parser.parse_args()


def _of_files(arguments: argparse.Namespace) -> dict[str, bool]:
    return {name: True for name in ("keep", "full") if getattr(arguments, name)}


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
    for number in range(rounds):
        ways = list(subject.ways(work))
        figures = figures or {way.name: [] for way in ways}
        for way in results.in_turns(ways, number):
            figures[way.name].append(way.measure())
            subject.clear()
    return figures


def _series(subject: Subject, work: Work, figures: dict[str, Rounds]) -> list[Series]:
    return [
        Series(subject.name, f"{operation} {format_bytes(work.chunk_bytes)}", name, *quantity)
        for operation in OPERATIONS
        for name, rounds in figures.items()
        for quantity in (
            (
                "throughput",
                "MiB/s",
                [work.chunks * work.chunk_bytes / 2**20 / one[operation].seconds for one in rounds],
            ),
            ("CPU a chunk", "us", [one[operation].cpu_s / work.chunks * 1e6 for one in rounds]),
        )
    ]


def _print_table(subject: Subject, work: Work, series: list[Series]) -> None:
    print(
        f"\n{subject.name}, chunks of {format_bytes(work.chunk_bytes)}, "
        f"{work.at_a_time} at a time, {work.chunks} a measurement, "
        f"{len(series[0].values)} rounds; the limit is {subject.limit}"
    )
    print(
        f"{'':24}{'':8}{'of the limit':>20}{'kvtier to it':>20}{'CPU us':>10}{'kvtier':>10}\n"
        f"{'':24}{'MiB/s':>8}{'and quartiles':>20}{'and quartiles':>20}"
        f"{'a chunk':>10}{'to it':>10}"
    )
    by_name = {(each.case, each.way, each.quantity): each for each in series}
    for (case, way, quantity), rate in by_name.items():
        if quantity != "throughput":
            continue
        limit, kvtier = by_name[case, subject.limit, quantity], by_name[case, "kvtier", quantity]
        cpu, kvtier_cpu = (by_name[case, name, "CPU a chunk"] for name in (way, "kvtier"))
        print(
            f"{case.split()[0]:8}{way:16}{rate.median:8.0f}{rate.relative_to(limit).spread:>20}"
            f"{kvtier.relative_to(rate).spread:>20}{cpu.median:10.1f}"
            f"{kvtier_cpu.relative_to(cpu).median:10.2f}"
        )


if __name__ == "__main__":
    main()
