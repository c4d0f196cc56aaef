"""What the manager costs the scheduler's thread, per chunk, with and without tiers.

Usage: python tests/bench/scheduler.py [TRACE] [--rounds N]

Each round plays the workload without tiers, with the memory tier and with the file tier, so that a
noisy machine is noisy for all of them; the table shows medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from kvtier_sdk import TieringConfig
from kvtier_sdk.replay import chat_workload, read_trace, replay

_STATISTICS = ("mean", "p50", "p99", "max")


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", type=Path, help="block-hash trace; default: chats")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take medians over")
    parser.add_argument("--concurrency", type=int, default=1, help="requests that overlap")
    arguments = parser.parse_args()
    workload = read_trace(arguments.trace) if arguments.trace else chat_workload(1000, 0)
    samples: dict[str, list[dict[str, float]]] = {"no tier": [], "memory": [], "file": []}
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as root:
            urls = {"no tier": [], "memory": ["memory:"], "file": [f"file://{root}"]}
            for name, tiers in urls.items():
                config = TieringConfig.from_dict(
                    {"slots": 2000, "chunk_bytes": 4096, "tiers": tiers}
                )
                report = replay(workload, config, concurrency=arguments.concurrency)
                samples[name].append(report.scheduler_us)
    print("scheduler thread, CPU microseconds per chunk (p50, p99, max: over requests)")
    print(f"{'':10}" + "".join(f"{name:>10}" for name in _STATISTICS))
    for name, rounds in samples.items():
        medians = [statistics.median(sample[which] for sample in rounds) for which in _STATISTICS]
        print(f"{name:10}" + "".join(f"{median:10.1f}" for median in medians))


if __name__ == "__main__":
    main()
