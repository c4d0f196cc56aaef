"""The benchmarks run, on little work; their figures are not asserted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.reader

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


def test_report_measures_and_writes_its_page(tmp_path: Path) -> None:
    """The smallest section: what it says is what it has measured."""
    command = [sys.executable, str(BENCH / "report.py"), "--quick", "--only", "worker"]
    ran = subprocess.run(
        [*command, "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    kept = json.loads((tmp_path / "performance" / "worker.json").read_text())
    (low, high) = next(
        sorted(series["values"])
        for series in kept["runs"]["copies"]["series"]
        if (series["group"], series["case"], series["way"])
        == ("load", "256 x 2048 KiB", "scattered")
    )
    page = (tmp_path / "performance.md").read_text()
    (line,) = re.findall(r"^\| load, 256 x 2048 KiB \| ([\d.,]+) ", page, re.MULTILINE)
    assert 0 < low <= float(line) + 0.05
    assert float(line) - 0.05 <= high
    for scheme in ("light", "dark"):
        plot = ElementTree.parse(tmp_path / "performance" / f"worker-{scheme}.svg")
        assert "256 x 2048 KiB" in "".join(plot.getroot().itertext())
