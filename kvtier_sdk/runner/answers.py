"""A tier's answers read as results, with a precise error for an author's mistake."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from dataclasses import astuple
from typing import Any

import numpy as np

from kvtier_sdk.errors import TierError
from kvtier_sdk.types import Entry, OffloadKey, Usage


class NonsenseError(Exception):
    """A tier returned a value that is not a valid answer; the text describes it."""


def found_in(answer: Any, count: int) -> list[bool]:
    """Read the answer to a lookup of ``count`` keys, or raise a :class:`NonsenseError`."""
    answers = _items(answer, count)
    if not set(map(type, answers)) <= {bool}:
        for one in answers:
            if not (isinstance(one, int | np.integer | np.bool_) and one in (0, 1)):
                raise _misplaced(one, "a boolean")
    return list(map(bool, answers))


def verdicts_in(answer: Any, count: int) -> list[TierError | None]:
    """Read the answer to a load or a store of ``count`` chunks, or raise a NonsenseError."""
    verdicts = _items(answer, count)
    for one in verdicts:
        if not (one is None or isinstance(one, TierError)):
            raise _misplaced(one, "None or a TierError")
    return verdicts


def key_in(entry: Any) -> OffloadKey:
    """Read the key of an entry from ``scan``, or raise a :class:`NonsenseError`."""
    if not (isinstance(entry, Entry) and isinstance(entry.key, bytes)):
        raise _misplaced(entry, "an Entry with its key")
    return entry.key


def usage_in(answer: Any) -> Usage:
    """Read the answer to ``usage``, or raise a :class:`NonsenseError`."""
    try:
        numbers: Any = [None if n is None else operator.index(n) for n in astuple(answer)]
        return Usage(*numbers)
    except TypeError:
        raise _misplaced(answer, "a Usage of numbers") from None


def _items(answer: Any, count: int) -> list[Any]:
    try:
        given = len(answer)
    except TypeError:
        given = -1
    # The items of a mapping or a set have no order.
    if given < 0 or isinstance(answer, Mapping | Set):
        raise NonsenseError(f"a {type(answer).__name__} for a batch of {count}")
    if given != count:
        raise NonsenseError(f"{given} results for a batch of {count}")
    return list(answer)


def _misplaced(one: object, wanted: str) -> NonsenseError:
    return NonsenseError(f"a {type(one).__name__} where {wanted} belongs")
