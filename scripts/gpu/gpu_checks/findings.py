"""Findings of a check: figures and failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias


class Figure(NamedTuple):
    """A figure of the report.

    Attributes:
        name: the measured quantity.
        value: a number, or words.
        unit: unit of the number; empty for a count and for words.
    """

    name: str
    value: float | str
    unit: str


class Failure(NamedTuple):
    """A condition that does not hold."""

    text: str


class Ended(NamedTuple):
    """The end of a check.

    Attributes:
        wanted: the purpose of a missing device; empty if the check was complete.
    """

    wanted: str


Message: TypeAlias = Figure | Failure | Ended


class NoDeviceError(Exception):
    """There is no device for the rest of a check."""


class Findings:
    """The outlet of a check's findings, which are sent at once: a check may be killed.

    Args:
        send: called with each message.
    """

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send

    def figure(self, name: str, value: float | str, unit: str = "") -> None:
        """Report a figure."""
        self._send(Figure(name, value, unit))

    def expect(self, holds: object, otherwise: str) -> None:
        """Report a failure unless something holds; the check goes on.

        Args:
            holds: the condition.
            otherwise: the failure if it is false.
        """
        if not holds:
            self._send(Failure(otherwise))
