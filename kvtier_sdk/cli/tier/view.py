"""The output of the commands about tiers: columns, ages, shares, a progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvtier_sdk.cli.say import say
from kvtier_sdk.options.place import one_line

#: Advances a bar by a number of units.
Step = Callable[[int], None]

_UNITS = (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def print_columns(rows: Sequence[Sequence[str]], right: frozenset[int] = frozenset()) -> None:
    """Print rows in columns; the first row holds the titles."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def ago(then_s: float | None, now_s: float) -> str:
    """Format the time since ``then_s``, for example ``3 d``."""
    if then_s is None:
        return "-"
    past_s = max(0.0, now_s - then_s)
    for unit, length_s in _UNITS:
        if past_s >= length_s:
            return f"{past_s / length_s:.0f} {unit}"
    return "now"


def share(part: float, whole: float) -> str:
    """Format a share of a whole, for example ``12%``."""
    return f"{part / whole:.0%}" if whole else "-"


@contextmanager
def progress(label: str, total: int | None, *, of_bytes: bool = False) -> Iterator[Step]:
    """Show a bar on a terminal while the block runs; yield a function that advances it."""
    columns = [TextColumn("{task.description}", markup=False), BarColumn()]
    columns += [TransferSpeedColumn()] if of_bytes else [MofNCompleteColumn()]
    console = Console(stderr=True)
    # In a file or a pipe, a bar would be noise.
    hidden = not console.is_terminal
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=hidden, transient=True
    ) as bar:
        task = bar.add_task(one_line(label), total=total)
        yield lambda count: bar.advance(task, count)
