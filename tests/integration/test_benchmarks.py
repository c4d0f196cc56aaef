"""The benchmarks run, on little work; their figures are not asserted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("scheduler.py --requests 10 --rounds 1 --slots 200", "file tier moved"),
        ("endurance.py --requests 60 --concurrency 8", "hit rate"),
        ("handover.py --steps 20 --submits 1", "p99 us"),
        ("file_tier.py --rounds 1 --total 4MiB --processes 1 2", "ratio"),
        ("backends.py --rounds 1 --total 4MiB --kib 256", "redis-benchmark"),
        ("sealed.py --rounds 1 --total 4MiB", "sealed"),
        ("pieces.py --rounds 1 --total 4MiB", "9 of 256KiB"),
        ("interference.py --rounds 1 --seconds 0.2 --mbps 20 --tier redis", "process*"),
    ],
    ids=lambda value: value.partition(".py")[0],
)
def test_benchmark_runs(command: str, says: str) -> None:
    program, *arguments = command.split()
    ran = subprocess.run(
        [sys.executable, str(BENCH / program), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert says in ran.stdout
