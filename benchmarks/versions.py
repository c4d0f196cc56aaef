"""Compares two versions of kvtier by running a benchmark with each in turn.

Usage: python benchmarks/versions.py [--rounds N] OLD NEW BENCHMARK.py [OPTION ...]

OLD and NEW are checkouts or wheels. In each round, this checkout's benchmark runs once with each
version, in a new process.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import results
from results import ROOT
from runner import Benchmark, Sample


def main() -> None:
    bench = Benchmark(__doc__, rounds=5)
    for name in ("old", "new"):
        bench.option(name, type=Path)
    bench.option("benchmark")
    bench.option("arguments", nargs=argparse.REMAINDER)
    options = bench.parse()
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        places = {"new": options.new, "old": options.old}
        for name, place in places.items():
            if place.suffix == ".whl":
                places[name] = Path(directory, name)
                zipfile.ZipFile(place).extractall(places[name])
        turn = partial(_turn, options.benchmark, options.arguments)
        sides = {name: partial(turn, place.resolve()) for name, place in places.items()}
        bench.measure(options.benchmark, sides)
    bench.finish()


def _turn(program: str, arguments: Sequence[str], place: Path, number: int) -> Iterator[Sample]:
    path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, ROOT / "benchmarks" / program, *arguments, "--json", file.name],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for one in results.read(Path(file.name)).series:
            yield f"{one.group}, {one.way}, {one.case}", one.quantity, one.unit, one.median


if __name__ == "__main__":
    main()
