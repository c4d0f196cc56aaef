"""Measure the throughput of each backend, a plain client and a limit.

Usage: python benchmarks/backends.py [--backend NAME ...] [--kib N ...] [--rounds N] ...

The benchmark starts its own servers on the loopback. The last program in each table is the limit.
The limit only moves bytes, with as many clients or threads as the tier has connections:

    redis     redis-benchmark
    file      preadv and pwritev of the same buffers in the same directory
    s3        requests over bare sockets to the same server, signed in advance
    mooncake  the client's calls with one buffer per chunk

The benchmark calls a tier as a runner does, with batches of up to 8 MiB. It makes as many calls at
once as the plain client has connections. The file tier has a real runner, with and without digests.
Each program moves random bytes, which are then compared and removed. Files bypass the page cache if
the disk allows it. vLLM's C extension is measured in vLLM's environment only. MiB/s count the
payload. CPU is the client's processor time per chunk, in user and kernel mode. On a busy machine,
CPU is more reliable than wall time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

from runner import Benchmark, Sample, positive
from ways.way import SUBJECTS, Subject, Way, Work, open_subject

from kvtier_sdk.options.units import parse_bytes


def main() -> None:
    bench = Benchmark(__doc__, rounds=5)
    names = list(SUBJECTS)
    bench.option("--backend", choices=names, nargs="+", default=names, help="default: all of them")
    bench.option("--kib", type=positive, nargs="+", default=[2048, 128], help="of a chunk")
    bench.option("--total", type=parse_bytes, default="256MiB", help="of each measurement")
    bench.option("--at-a-time", type=positive, default=4, help="connections, or threads")
    keep = "file: remove nothing between the rounds; ext4 is slow for a while after many removals"
    bench.option("--keep", action="store_true", help=keep)
    full = "file: there is room for the chunks of one round, and each store removes another"
    bench.option("--full", action="store_true", help=full)
    bench.option("--tls", action="store_true", help="s3: over https")
    options = bench.parse()
    chosen = ("keep", "full", "tls")
    of_subject = {name: True for name in chosen if getattr(options, name)}
    for backend in options.backend:
        with open_subject(backend, options.root, **of_subject) as subject:
            for kib in options.kib:
                work = _work(subject, kib * 1024, options.total, options.at_a_time)
                ways = subject.ways(work)
                turns = {name: partial(_turn, subject, make) for name, make in ways.items()}
                bench.measure(backend, turns, warm_up=options.full)
    bench.finish()


def _work(subject: Subject, chunk_bytes: int, total_bytes: int, at_a_time: int) -> Work:
    chunks = max(at_a_time, total_bytes // chunk_bytes)
    return Work(
        chunk_bytes=chunk_bytes,
        header_bytes=subject.header_bytes,
        chunks=chunks,
        keys=min(chunks, (subject.keys_bytes or total_bytes) // chunk_bytes or 1),
        at_a_time=at_a_time,
    )


def _turn(subject: Subject, make: Callable[[int], Way], number: int) -> Iterator[Sample]:
    yield from make(number).samples()
    subject.clear()
    # Write dirty pages back now, because a later write-back would slow the next measurement.
    os.sync()


if __name__ == "__main__":
    main()
