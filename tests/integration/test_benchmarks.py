"""The benchmarks run with small sizes; their timings are not checked."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support.author import run

pytestmark = pytest.mark.reader

BENCH = Path(__file__).parents[2] / "benchmarks"


def bench(program: str, *arguments: str) -> str:
    return run([sys.executable, str(BENCH / program), *arguments], BENCH.parent)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("scheduler.py --requests 10 --rounds 1 --slots 200", "memory tier, lru"),
        ("file_tier.py --rounds 1 --total 4MiB --processes 1 2", "plain, 2"),
        ("backends.py --rounds 1 --total 4MiB --kib 256", "redis-benchmark"),
        ("backends.py --backend file --rounds 1 --total 4MiB --kib 256 --full", "preadv/pwritev"),
        ("interference.py --rounds 1 --seconds 0.2 --mbps 20 --tier redis", "apart"),
        ("compressed_loads.py --rounds 1 --chunks 4 --kib 256 --backend redis", "never"),
        ("policies.py --requests 40", "optimum"),
        ("scale.py --slots 10000 --tiers 1 --requests 10 --files 500", "start of the file tier"),
        (
            "versions.py --rounds 1 . . worker.py --rounds 1 --layers 1 --pages 16 --kib 16",
            "store, scattered, 16 x 16 KiB",
        ),
    ],
    ids=lambda value: value.partition(".py")[0],
)
def test_benchmark_runs(command: str, says: str) -> None:
    assert says in bench(*command.split())


def test_endurance_runs() -> None:
    command = [sys.executable, "-m", "support.endurance", "--requests", "60", "--concurrency", "8"]
    assert "no wrong byte, nothing left" in run(command, BENCH.parent / "tests")


def test_wrong_bytes_end_a_benchmark(tmp_path: Path) -> None:
    program = tmp_path / "damaged.py"
    program.write_text(
        f"import sys; sys.path[0] = {str(BENCH)!r}\n"
        "from ways.file_ways import PlainFiles\n"
        "from ways.way import Work\n"
        "class Damaged(PlainFiles):\n"
        "    async def load(self):\n"
        "        await super().load()\n"
        "        self.work.slots[-1][1][5] ^= 1\n"
        "work = Work(65536, header_bytes=4096, chunks=8, keys=8, at_a_time=2)\n"
        f"list(Damaged(work, {str(tmp_path)!r}).samples())\n"
    )
    ran = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == "wrong bytes came back: the figures mean nothing\n"


def test_report_measures_and_writes_its_page(tmp_path: Path) -> None:
    bench("report.py", "--quick", "--only", "worker", "--into", str(tmp_path))
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
