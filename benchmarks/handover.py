"""Cost of handing jobs to a tier's client and of polling it, on the engine's thread.

Usage: python benchmarks/handover.py [--steps N] [--submits N ...]

Each step hands over a few lookups, each in its own hop, polls once, and then sleeps, as an engine
does that waits for its device. Only CPU time of the calling thread counts. To compare two versions,
run the script in turns with PYTHONPATH at one and at the other.
"""

from __future__ import annotations

import argparse
import statistics
import time

from kvtier_sdk import (
    HostPool,
    Namespace,
    RequestContext,
    TierListener,
    make_offload_key,
    open_tier,
)

_AWAY_S = 0.0005
_KEYS = [make_offload_key(bytes([n]) * 32) for n in range(4)]
_REQUEST = RequestContext("bench")


def main() -> None:
    """Measure each number of submits a step and print a line for it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000, help="steps a measurement")
    parser.add_argument("--submits", type=int, nargs="*", default=[1, 4, 16], help="a step")
    arguments = parser.parse_args()
    print(f"{'submits a step':>15}{'mean us':>10}{'p50 us':>10}{'p99 us':>10}")
    for submits in arguments.submits:
        spent_us = measure(submits, arguments.steps)
        p99 = statistics.quantiles(spent_us, n=100)[98]
        figures = (statistics.mean(spent_us), statistics.median(spent_us), p99)
        print(f"{submits:15}" + "".join(f"{figure:10.1f}" for figure in figures))


def measure(submits: int, steps: int) -> list[float]:
    """Return the CPU microseconds of each step."""
    pool = HostPool(1, 4096)
    spent_us = []
    try:
        with open_tier("memory:?lookup_deadline=60s", pool, Namespace({}), TierListener()) as tier:
            for _ in range(steps):
                started_ns = time.thread_time_ns()
                for _ in range(submits):
                    tier.lookup(_KEYS, _REQUEST)
                    tier.flush()
                tier.poll()
                spent_us.append((time.thread_time_ns() - started_ns) / 1e3)
                time.sleep(_AWAY_S)
    finally:
        pool.close()
    return spent_us


if __name__ == "__main__":
    main()
