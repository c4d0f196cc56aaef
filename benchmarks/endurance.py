"""A long replay: no wrong byte, nothing left over at the end, and memory that does not grow.

Usage: python benchmarks/endurance.py [--requests N] [--concurrency N] [--tier URL ...]

Generated chats overlap through a host pool of a tenth of their chunks, so that chunks are evicted
and promoted all the time. Resident memory is sampled on the way. The tiers have a capacity, so that
memory is flat once they are full. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from pathlib import Path

from kvtier_sdk import TieringConfig
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.replay import ReplayReport, chat_workload, replay

_CHUNK_BYTES = 4096
_SAMPLES = 20
#: Growth of the resident memory that is allowed in the second half of the run: allocators grow in
#: steps. A leak of some 500 bytes by each of 50,000 requests would be seen.
_GROWTH = 0.05


def main() -> int:
    """Play the chats and print the findings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000, help="default: 100000")
    parser.add_argument("--concurrency", type=int, default=64, help="default: 64")
    parser.add_argument("--seed", type=int, default=0, help="of the workload; default: 0")
    parser.add_argument(
        "--tier",
        action="append",
        metavar="URL",
        help="repeatable; default: memory of 128MiB, then files of 256MiB in a new directory",
    )
    arguments = parser.parse_args()
    workload = chat_workload(arguments.requests, arguments.seed)
    distinct = len({key for request in workload for key in request.keys})
    resident: list[int] = []
    every = max(1, arguments.requests // _SAMPLES)

    def on_progress(done: int) -> None:
        if done % every == 0:
            resident.append(_resident_bytes())
            print(f"{done:8} requests, {format_bytes(resident[-1])} resident", flush=True)

    with tempfile.TemporaryDirectory(prefix="kvtier-endurance-") as root:
        tiers = arguments.tier or ["memory:?capacity=128MiB", f"file://{root}?capacity=256MiB"]
        config = TieringConfig.from_dict(
            {"slots": max(1, distinct // 10), "chunk_bytes": _CHUNK_BYTES, "tiers": tiers}
        )
        report = replay(
            workload, config, concurrency=arguments.concurrency, on_progress=on_progress
        )
    print(
        f"{report.chunks} chunks, {distinct} of them distinct, {config.slots} slots: hit rate "
        f"{report.hit_rate:.3f}, {report.dropped} dropped, {report.elapsed_s:.0f} s"
    )
    faults = _faults(report, resident)
    print(*(faults or ["no wrong byte, nothing left, memory flat"]), sep="\n")
    return 1 if faults else 0


def _faults(report: ReplayReport, resident: list[int]) -> list[str]:
    faults = []
    if report.wrong_bytes:
        faults.append(f"{report.wrong_bytes} wrong bytes")
    faults += [f"{count} {what} left over" for what, count in report.left_over.items() if count]
    if len(resident) > 1:
        middle = resident[(len(resident) - 1) // 2]
        grown = resident[-1] / middle - 1
        print(f"resident memory grew by {grown:.1%} in the second half")
        if grown > _GROWTH:
            faults.append(f"more than the {_GROWTH:.0%} that are allowed")
    return faults


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
