"""The figures of a section, and the file that stores them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from results import Result, Series, figure


@dataclass(frozen=True)
class Figures:
    runs: Mapping[str, Result]
    quick: bool = False

    def find(self, run: str, group: str, case: str, way: str, quantity: str) -> Series | None:
        wanted = (group, case, way, quantity)
        for each in self.series(run):
            if (each.group, each.case, each.way, each.quantity) == wanted:
                return each
        return None

    def cases(self, run: str, group: str, quantity: str) -> Sequence[str]:
        """Return the cases in which a quantity was measured, in the benchmark's order."""
        wanted = (group, quantity)
        of = (each.case for each in self.series(run) if (each.group, each.quantity) == wanted)
        return list(dict.fromkeys(of))

    def series(self, run: str) -> Sequence[Series]:
        return self.runs[run].series if run in self.runs else ()


def median(series: Series | None) -> str | None:
    return f"{figure(series.median)} {series.unit}".strip() if series else None


def read(file: Path) -> Figures:
    """Read the figures, or return empty figures if the file is missing."""
    return msgspec.json.decode(file.read_bytes(), type=Figures) if file.exists() else Figures({})


def write(file: Path, figures: Figures) -> None:
    text = msgspec.json.format(msgspec.json.encode(figures), indent=1).decode()
    lines = re.sub(r"\{[^{}]*\}|\[[^][{}]*\]", lambda part: " ".join(part[0].split()), text)
    lines = re.sub(r"\{[^{}]*\}", lambda part: " ".join(part[0].split()), lines)
    file.write_text(lines + "\n")
