"""Bounds on a configuration, so that reading it and telling of it takes a bounded time.

The options of a file may be far larger than the file: an alias in YAML stands for all that it
names, and a key in TOML for as many tables as it has dots. The bounds hold for every source alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kvtier_sdk.errors import ConfigError

if TYPE_CHECKING:
    from kvtier_sdk.options.place import Place

_VALUES = 10_000
_DEPTH = 32
_NAME_CHARACTERS = 200
_TEXT_CHARACTERS = 16_384
_DIGITS = 40


def check_bounds(options: object, place: Place) -> None:
    """Refuse options that are too large or hold broken text.

    Args:
        options: tables, lists and values; of other objects nothing is known.
        place: of the options.

    Raises:
        ConfigError: a line with the place of the first fault, and without its value.
    """
    waiting = [(options, place, 0)]
    seen = 0
    while waiting:
        value, at, depth = waiting.pop()
        seen += 1
        if seen > _VALUES:
            raise ConfigError(f"{place} holds more than {_VALUES:,} values")
        if depth > _DEPTH:
            raise ConfigError(f"{at} is nested more than {_DEPTH} deep")
        if isinstance(value, str):
            _check_text(value, at, _TEXT_CHARACTERS, "")
        elif isinstance(value, int) and abs(value) >= 10**_DIGITS:
            raise ConfigError(f"{at} is a number of more than {_DIGITS} digits")
        # Not more than can be looked at: one list may hold itself many times.
        waiting += ((inner, to, depth + 1) for inner, to in _inside(value, at))


def _inside(value: object, at: Place) -> Iterator[tuple[object, Place]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            text = str(name) if isinstance(name, str) else type(name).__name__
            _check_text(text, at, _NAME_CHARACTERS, " in a name")
            yield inner, at.at(text)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value[: _VALUES + 1]):
            yield inner, at.at(index)


def _check_text(text: str, at: Place, most: int, where: str) -> None:
    if len(text) > most:
        raise ConfigError(f"{at} has {len(text):,} characters{where}; at most {most:,} are allowed")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{at} holds half of a surrogate pair{where}, which is no text")
