"""Cost of the manager for the scheduler's thread: the compiled core beside the pure one.

Usage: python benchmarks/cores.py [TRACE] [--rounds N] [--concurrency N]

It takes the compiled core out of the wheel in ``dist/`` ("make wheels") and the pure one out of the
checkout. In each round both play ``scheduler.py`` once, in processes of their own and in turns.
Shown are CPU microseconds of the scheduler's thread per chunk, and of its slowest calls: the median
over the rounds, and the quartiles.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import results
from results import Series

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
    options = ["--cost-only", "--rounds", "1", "--concurrency", arguments.concurrency]
    if arguments.trace is not None:
        options.append(arguments.trace)
    rounds: dict[str, list[Sequence[Series]]] = {"pure": [], "compiled": []}
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as directory:
        zipfile.ZipFile(wheels[0]).extractall(directory)
        places = {"pure": str(_ROOT), "compiled": directory}
        for number in range(arguments.rounds):
            for core in results.in_turns(places, number):
                rounds[core].append(_play(places[core], options))
    print(f"microseconds, median (quartiles) of {arguments.rounds} rounds")
    first = rounds["pure"][0]
    sides = list(dict.fromkeys(each.way for each in first))
    columns = [(core, side) for core in rounds for side in sides]
    _print_row("", (f"{core}, {side}" for core, side in columns))
    for case, quantity in dict.fromkeys((each.case, each.quantity) for each in first):
        cells = (_joined(rounds[core], case, quantity, side) for core, side in columns)
        _print_row(f"{case}, {quantity}", cells)


def _play(place: str, options: Sequence[str]) -> Sequence[Series]:
    program = str(Path(__file__).with_name("scheduler.py"))
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run(
            [sys.executable, program, *options, "--json", file.name],
            env={**os.environ, "PYTHONPATH": place},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return results.read(Path(file.name)).series


def _joined(rounds: Sequence[Sequence[Series]], case: str, quantity: str, side: str) -> str:
    """Return the median and the quartiles over the rounds; nothing where a side has none."""
    values = [
        each.values[0]
        for played in rounds
        for each in played
        if (each.case, each.quantity, each.way) == (case, quantity, side)
    ]
    return Series("", case, side, quantity, "us", values).spread if values else ""


def _print_row(name: str, cells: Any) -> None:
    print(f"  {name:32}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
