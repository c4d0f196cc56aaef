"""What a check finds: figures, and what does not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Figure(NamedTuple):
    """A figure of the report.

    Attributes:
        name: what was measured.
        value: a number, or words.
        unit: of the number; empty for a count and for words.
    """

    name: str
    value: float | str
    unit: str


class Failure(NamedTuple):
    """Something that does not hold."""

    text: str


class Ended(NamedTuple):
    """The check came to its end.

    Attributes:
        wanted: what it wanted a device for, where there is none; empty if it did all of it.
    """

    wanted: str


Message: TypeAlias = Figure | Failure | Ended


class NoDeviceError(Exception):
    """The rest of a check needs a device, and there is none."""


class Findings:
    """Takes what a check finds, and hands it on at once: a check may be killed.

    Args:
        send: gets each message.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Report a figure."""
        self._send(Figure(name, value, unit))

    def expect(self, holds: object, otherwise: str) -> None:
        """Report a failure unless something holds; the check goes on.

        Args:
            holds: true if all is well.
            otherwise: what is wrong if not.
        """
        if not holds:
            self._send(Failure(otherwise))
