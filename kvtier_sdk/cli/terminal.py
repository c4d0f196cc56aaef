"""Helpers for reading flags and for printing lines, columns and progress bars."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.secrets import MaskingFormatter

T = TypeVar("T", int, float)

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout instead of the text.")
]


def read_flag(flag: str, parse: Callable[[str], T], text: str, *, may_be_0: bool = False) -> T:
    """Parse a flag; raise :class:`ConfigError` for invalid text, and for 0 unless ``may_be_0``."""
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
    if not value and not may_be_0:
        raise ConfigError(f"{flag} should be more than 0")
    return value


def read_settings(texts: Sequence[str]) -> dict[str, str]:
    """Parse arguments such as ``ttl=1h``; raise :class:`ConfigError` for invalid arguments."""
    settings: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name in settings:
            raise ConfigError(f"{text!r} should be OPTION=VALUE, each option once")
        settings[name] = value
    return settings


def say(*lines: str, to_stderr: bool = False) -> None:
    """Print escaped lines, so that text from a store can neither move the cursor nor add lines."""
    for line in lines:
        # Flush even if the output is a pipe, because the next line may come much later.
        print(one_line(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)


class TerminalFormatter(MaskingFormatter):
    """Escapes log records, because libraries log text that a store has sent."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(one_line, super().format(record).split("\n")))


def print_columns(rows: Sequence[Sequence[str]], numbers_from: int | None = None) -> None:
    """Print rows as a table. The columns from index ``numbers_from`` on are right-aligned."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    first = len(widths) if numbers_from is None else numbers_from
    for row in rows:
        cells = [
            cell.ljust(width) if index < first else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        say("  ".join(cells).rstrip())


def share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal in the ``with`` block; yield a function that advances the bar."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        # A bar would only clutter the output in a file or a pipe.
        disable=not console.is_terminal,
        transient=True,
    ) as bar:
        task = bar.add_task(one_line(label), total=total)
        yield lambda count: bar.advance(task, count)
