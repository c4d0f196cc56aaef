"""The report: printed as it grows, and written as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from gpu_checks import Check
from gpu_checks.findings import Ended, Failure, Figure, Message

PASSED, FAILED, WANTED_DEVICE = "passed", "failed", "wanted a device"


@dataclass
class Result:
    """The result of a check.

    Attributes:
        check: the check.
        figures: its measurements.
        failures: the conditions that do not hold; several lines for an exception.
        wanted: the purpose of a missing device; ``None`` until the check's end.
        took_s: its duration.
    """

    check: Check
    figures: list[Figure] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wanted: str | None = None
    took_s: float = 0.0

    @property
    def status(self) -> str:
        """The outcome in words; a check that wants a device can have failed before that."""
        if self.failures or self.wanted is None:
            return FAILED
        return WANTED_DEVICE if self.wanted else PASSED


class Report:
    """A report that prints its messages, and keeps them for its files.

    Args:
        folder: directory of ``report.txt`` and ``report.json``; made if it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._lines: list[str] = []
        self.results: list[Result] = []

    def say(self, text: str = "") -> None:
        """Print one or several lines."""
        print(text, flush=True)
        self._lines.append(text)

    def begin(self, check: Check) -> None:
        """Begin a check, to which the next messages belong."""
        self.results.append(Result(check))
        self.say(f"\n{len(self.results)}. {check.title} ({check.name})")

    def take(self, message: Message) -> None:
        """Note a message of the check."""
        result = self.results[-1]
        if isinstance(message, Figure):
            result.figures.append(message)
            self.say(f"   {message.name:<58} {_words(message.value)} {message.unit}".rstrip())
        elif isinstance(message, Failure):
            result.failures.append(message.text)
            self.say("   FAILED: " + message.text.replace("\n", "\n           "))
        elif isinstance(message, Ended):
            result.wanted = message.wanted

    def end(self, took_s: float) -> None:
        """Print the check's outcome, and write the files: the next check may be the last."""
        result = self.results[-1]
        result.took_s = took_s
        why = f" for {result.wanted}" if result.status == WANTED_DEVICE else ""
        self.say(f"   {result.status}{why}; took {took_s:.1f} s")
        self.write()

    def conclude(self) -> bool:
        """Print how many checks passed, and which did not; return true if none failed."""
        by_status = {
            status: [result.check.name for result in self.results if result.status == status]
            for status in (PASSED, FAILED, WANTED_DEVICE)
        }
        self.say(f"\n{sum(result.took_s for result in self.results):.0f} s in all")
        for status, names in by_status.items():
            self.say(f"{len(names):2} {status}" + (f": {', '.join(names)}" if names else ""))
        self.write()
        return not by_status[FAILED]

    def write(self) -> None:
        """Write both files."""
        checks = [
            {
                "name": result.check.name,
                "title": result.check.title,
                "status": result.status,
                "took_s": round(result.took_s, 3),
                "figures": [figure._asdict() for figure in result.figures],
                "failures": result.failures,
                "wanted": result.wanted or "",
            }
            for result in self.results
        ]
        (self._folder / "report.json").write_text(json.dumps({"checks": checks}, indent=1) + "\n")
        (self._folder / "report.txt").write_text("\n".join(self._lines) + "\n")


def _words(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
