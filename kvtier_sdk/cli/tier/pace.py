"""A limit of bytes per second, for commands that read and write many chunks."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.cli.terminal import read_flag
from kvtier_sdk.options.units import parse_bytes

RateOption = Annotated[
    str | None,
    typer.Option(
        "--rate",
        metavar="SIZE",
        show_default="no limit",
        help="At most so many bytes a second, such as 100MiB, to leave the store to its engines.",
    ),
]


class Pace:
    """Waits, so that bytes are moved no faster than at the given rate."""

    def __init__(self, rate: str | None, clock: Clock | None = None) -> None:
        self._rate_bytes = None if rate is None else read_flag("--rate", parse_bytes, rate)
        self._clock = clock or SystemClock()
        self._due_s = self._clock.now_s()
        self._never = threading.Event()

    def part_bytes(self, most_bytes: int) -> int:
        """Return the bytes to move before the next wait: a second's worth, or less."""
        return most_bytes if self._rate_bytes is None else min(most_bytes, self._rate_bytes)

    def wait(self, size_bytes: int) -> None:
        """Wait as long as ``size_bytes`` take at the rate, less the time since the last call."""
        if self._rate_bytes is None:
            return
        now_s = self._clock.now_s()
        self._due_s = max(self._due_s, now_s - 1.0) + size_bytes / self._rate_bytes
        self._never.wait(max(0.0, self._due_s - now_s))
