"""The options, the rounds and the table that all benchmarks share."""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import results
from results import ROOT, Series, gain

# Benchmarks start servers and engines through ``tests/support``, so make it importable.
sys.path.append(str(ROOT / "tests"))

#: The case, quantity, unit and value of one measurement.
Sample = tuple[str, str, str, float]


class Benchmark:
    """A benchmark's options and figures. ``absent`` maps each unmeasured program to a reason."""

    options: argparse.Namespace

    def __init__(self, text: str | None, *, rounds: int = 0, root: str = "") -> None:
        self._parser = argparse.ArgumentParser(
            description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.option = self._parser.add_argument
        self.absent: dict[str, str] = {}
        self._measured: list[Series] = []
        if rounds:
            self.option("--rounds", type=positive, default=rounds, help="default: %(default)s")
        place = root or tempfile.gettempdir()
        self.option("--root", type=Path, default=place, help="directory on the disk to measure")
        self.option("--json", type=Path, metavar="FILE", help="write the figures there too")

    def parse(self) -> argparse.Namespace:
        self.options = self._parser.parse_args()
        return self.options

    @contextmanager
    def folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=self.options.root) as folder:
            yield Path(folder)

    def measure(
        self,
        group: str,
        sides: Mapping[str, Callable[[int], Iterable[Sample]]],
        *,
        warm_up: bool = False,
    ) -> None:
        """Measure each program once per round, in changing order, and print the figures.

        Args:
            group: subject of the measurement.
            sides: the measured programs by name, kvtier's first. Each function gets the number of
                the round, and ends all its work before it returns.
            warm_up: true to begin with an extra round, numbered -1, and drop its figures.
        """
        values: dict[tuple[str, str, str, str], list[float]] = {}
        for number in range(-int(warm_up), self.options.rounds):
            for side in results.in_turns(sides, number):
                for case, quantity, unit, value in sides[side](number):
                    if number >= 0:
                        values.setdefault((case, side, quantity, unit), []).append(value)
        self.add([Series(group, *names, each) for names, each in values.items()], next(iter(sides)))

    def add(self, series: Sequence[Series], own: str | None = None) -> None:
        """Record and print one group's series. Compare the way ``own``, if any, with the others."""
        self._measured += series
        title = f"{series[0].group}: {len(series[0].values)} round(s), medians (quartiles)"
        compared = f"; {own} beside it in the same round, above 1 is better for {own}"
        print(f"\n{title}{compared if own else ''}")
        by_name = {(one.case, one.quantity, one.way): one for one in series}
        for case, quantity in dict.fromkeys((one.case, one.quantity) for one in series):
            ours = by_name.get((case, quantity, own or ""))
            for one in series:
                if (one.case, one.quantity) == (case, quantity):
                    ratio = "" if one is ours else gain(ours, one) or ""
                    cells = f"{one.way:24} {one.spread:>24} {one.unit:6} {ratio:>20}"
                    print(f"  {case:24} {quantity:18} {cells}".rstrip(), flush=True)

    def finish(self) -> None:
        if self.options.json is not None:
            root = Path(self.options.root)
            results.write(self.options.json, self._measured, root=root, absent=self.absent)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} should be at least 1")
    return number


def freeze() -> None:
    """Exclude existing objects from later garbage collections, as vLLM does after its start."""
    gc.collect()
    gc.freeze()


def must_be_equal(equal: bool) -> None:
    if not equal:
        sys.exit("wrong bytes came back: the figures mean nothing")
