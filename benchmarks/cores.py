"""Cost of the manager for the scheduler's thread: the compiled core beside the pure one.

Usage: python benchmarks/cores.py [TRACE] [--rounds N] [--concurrency N]

It takes the compiled core out of the wheel in ``dist/`` ("make wheels") and the pure one out of the
checkout. In each round both play ``scheduler.py`` once, in processes of their own and in turns.
Shown are CPU microseconds of the scheduler's thread per chunk, and of its slowest calls: the median
over the rounds, and the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).parents[1]


def main() -> None:
    """Play the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", nargs="?", default=None, help="block-hash trace; default: chats")
    parser.add_argument("--rounds", type=int, default=5, help="to take medians over")
    parser.add_argument("--concurrency", default="8", help="requests that overlap")
    arguments = parser.parse_args()
    wheels = [path for path in _ROOT.glob("dist/kvtier_sdk-*.whl") if "none-any" not in path.name]
    if len(wheels) != 1:
        sys.exit("dist/ has no wheel with a compiled core: make wheels")
    options = ["--json", "--rounds", "1", "--concurrency", arguments.concurrency]
    if arguments.trace is not None:
        options.append(arguments.trace)
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        zipfile.ZipFile(wheels[0]).extractall(directory)
        places = {"pure": str(_ROOT), "compiled": directory}
        rounds: dict[str, list[dict[str, Any]]] = {core: [] for core in places}
        for number in range(arguments.rounds):
            for core in list(places)[:: -1 if number % 2 else 1]:
                rounds[core].append(_play(places[core], options))
    print(f"microseconds, median (quartiles) of {arguments.rounds} rounds")
    columns = [(core, side) for core, played in rounds.items() for side in played[0]]
    _print_row("", (f"{core}, {side}" for core, side in columns))
    kinds = list(rounds["pure"][0]["memory tier"]["us_per_chunk"])
    for kind in kinds:
        _print_row(
            f"{kind}, per chunk" if kind == "all" else kind,
            (
                _in_words([each[side]["us_per_chunk"].get(kind, 0.0) for each in rounds[core]])
                for core, side in columns
            ),
        )
    for index, name in enumerate(("p50", "p99", "p99.9")):
        _print_row(
            f"a call, {name}",
            (
                _in_words([each[side]["percentiles_us"]["all"][index] for each in rounds[core]])
                for core, side in columns
            ),
        )


def _play(place: str, options: Sequence[str]) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name("scheduler.py")), *options]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": place}, stdout=subprocess.PIPE, check=True
    )
    played: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return played


def _in_words(values: Sequence[float]) -> str:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _print_row(name: str, cells: Any) -> None:
    print(f"  {name:20}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
