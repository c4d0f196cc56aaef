"""The figures of a section, and the file that keeps them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from results import Result, Series, figure


@dataclass(frozen=True)
class Figures:
    """The results of all runs of a section.

    Attributes:
        runs: results by the name of the run.
        quick: the runs were short, to try the report.
    """

    runs: Mapping[str, Result]
    quick: bool = False

    def find(self, run: str, group: str, case: str, way: str, quantity: str) -> Series | None:
        """Return one series, or ``None`` where it was not measured."""
        wanted = (group, case, way, quantity)
        for each in self.runs[run].series if run in self.runs else ():
            if (each.group, each.case, each.way, each.quantity) == wanted:
                return each
        return None

    def groups(self, run: str) -> Sequence[str]:
        """Return the groups that were measured, in the order of the benchmark."""
        series = self.runs[run].series if run in self.runs else ()
        return list(dict.fromkeys(each.group for each in series))

    def cases(self, run: str, group: str, quantity: str) -> Sequence[str]:
        """Return the cases in which a quantity was measured, in the order of the benchmark."""
        series = self.runs[run].series if run in self.runs else ()
        of = (each.case for each in series if (each.group, each.quantity) == (group, quantity))
        return list(dict.fromkeys(of))


def ratio(own: Series | None, peer: Series | None) -> str | None:
    """Format the ratio of two ways with its quartiles; ``None`` where one was not measured."""
    return own.relative_to(peer).spread if own and peer else None


def gain(own: Series | None, peer: Series | None, higher_is_better: bool) -> str | None:
    """Format the ratio of two ways such that above 1 is better for the first."""
    return ratio(own, peer) if higher_is_better else ratio(peer, own)


def median(series: Series | None) -> str | None:
    """Format a median with its unit; ``None`` where it was not measured."""
    return f"{figure(series.median)} {series.unit}".strip() if series else None


def sentence(template: str, *values: str | None) -> str:
    """Fill in a sentence, or leave it out where one of its figures was not measured."""
    return "" if None in values else template.format(*values)


def read(file: Path) -> Figures:
    """Read a section's figures; none where the file is missing."""
    return msgspec.json.decode(file.read_bytes(), type=Figures) if file.exists() else Figures({})


def write(file: Path, figures: Figures) -> None:
    """Write a section's figures, a series a line."""
    text = msgspec.json.format(msgspec.json.encode(figures), indent=1).decode()
    lines = re.sub(r"\{[^{}]*\}|\[[^][{}]*\]", lambda part: " ".join(part[0].split()), text)
    lines = re.sub(r"\{[^{}]*\}", lambda part: " ".join(part[0].split()), lines)
    file.write_text(lines + "\n")
