"""Reads the values of flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvtier_sdk.errors import ConfigError

T = TypeVar("T")


def read_flag(flag: str, parse: Callable[[str], T], text: str) -> T:
    """Read the value of a flag.

    Raises:
        ConfigError: ``parse`` refused the value.
    """
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
