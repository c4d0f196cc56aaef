"""MiB/s of an engine's own storages and of ours in their place, in one run.

Usage, in the engine's environment: python benchmarks/engine_storage.py lmcache|sglang [--mib N] ...

Each storage stores and loads one batch as the engine's own threads call it. Each round measures
every storage, and in each round another one is the first. A batch has new random bytes, all of
which are compared after the load. After each turn its files are unlinked, those of every storage
alike, and what is dirty is written back, so that every store begins with as much work for the disk.
A load finds the bytes of the store before it: in the page cache, or past it for those of "disk".
The CPU is that of this process and of the tiers' processes, not of a server. Ours checks digests.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import results
from results import Series
from ways.storage import Storage

#: Name of the way with which the others of its group are compared.
_OURS = "kvtier"


def main() -> None:
    """Run the rounds and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", choices=("lmcache", "sglang"))
    parser.add_argument("--mib", type=int, default=128, help="of a batch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="beside a first one (%(default)s)")
    parser.add_argument("--root", help="a directory on the disk to measure")
    results.add_option(parser)
    arguments = parser.parse_args()
    # By group, way and operation: seconds and CPU seconds of each round.
    spent: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=arguments.root) as folder,
        ExitStack() as stack,
    ):
        engine = import_module(f"ways.{arguments.engine}_storages")
        storages = engine.storages(Path(folder), arguments.mib << 20, stack)
        for number in range(arguments.rounds + 1):
            for (group, way), storage in results.in_turns(storages.items(), number):
                for operation, cost in _turn(storage, number):
                    if number:  # the first round warms up
                        spent.setdefault((group, way, operation), []).append(cost)
                for path in Path(folder, group, way).rglob("*"):
                    if path.is_file() and path.stat().st_size >= storage.object_bytes:
                        path.unlink()
                os.sync()
    series = [
        Series(group, operation, way, quantity, unit, values)
        for (group, way, operation), costs in spent.items()
        for quantity, unit, values in (
            ("throughput", "MiB/s", [arguments.mib / wall_s for wall_s, _ in costs]),
            ("per CPU second", "GiB", [arguments.mib / 1024 / cpu_s for _, cpu_s in costs]),
        )
    ]
    _print_table(series, f"{arguments.engine}, {arguments.mib} MiB, {arguments.rounds} rounds")
    results.write(arguments.json, series, root=arguments.root)


def _turn(storage: Storage, number: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """Give both operations, and the seconds and CPU seconds of each."""
    stored = storage.fill()
    yield "store", _cost(lambda: storage.store(number))
    storage.wipe()
    storage.find(number)
    yield "load", _cost(lambda: storage.load(number))
    if not storage.holds(stored):
        sys.exit("wrong bytes came back: the figures mean nothing")
    storage.clear()


def _cost(move: Callable[[], None]) -> tuple[float, float]:
    start_cpu_s, start_s = _cpu_s(os.getpid()), time.perf_counter()
    move()
    return time.perf_counter() - start_s, _cpu_s(os.getpid()) - start_cpu_s


def _cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process and its children, without the server of a store."""
    spent_s = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        spent_s += int((task / "schedstat").read_text().split()[0]) / 1e9
        for child in map(int, (task / "children").read_text().split()):
            if "redis-server" not in Path(f"/proc/{child}/cmdline").read_text():
                spent_s += _cpu_s(child)
    return spent_s


def _print_table(series: list[Series], title: str) -> None:
    print(f"{title}; medians (quartiles), and kvtier to it in the same round: above 1 is better")
    by_name = {(one.group, one.case, one.quantity, one.way): one for one in series}
    for (group, case, quantity, way), one in by_name.items():
        ours = by_name[group, case, quantity, _OURS]
        print(
            f"{group:8}{case:8}{way:28}{quantity:16}{one.spread:>24} {one.unit:6}"
            f"{ours.relative_to(one).spread:>22}"
        )


if __name__ == "__main__":
    main()
