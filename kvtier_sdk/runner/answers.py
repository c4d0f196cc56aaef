"""A tier's answers. They are read here and nowhere else, so that none can do harm later.

Everything that leaves this module is a plain list of the SDK's own values, or of errors that can be
read. A tier's object is only looked at under a guard: whatever it raises, the answer is nonsense.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from kvtier_sdk.errors import TierContractError, TierError
from kvtier_sdk.types import Entry, OffloadKey, Usage

T = TypeVar("T")

_BOOLEANS = frozenset({bool, np.bool_})


class NonsenseError(Exception):
    """An answer is none; the text says what was returned in its place."""


def found_in(answer: Any, count: int) -> list[bool]:
    """Read the answer to a lookup.

    Args:
        answer: what the tier returned.
        count: number of keys.

    Returns:
        A boolean a key.

    Raises:
        NonsenseError: it is not as many of ``bool``, ``numpy.bool_``, 0 and 1.
    """
    answers = _items(answer, count)
    if set(map(type, answers)) <= _BOOLEANS:
        return list(map(bool, answers))
    return [_each(one, _boolean, "a boolean") for one in answers]


def verdicts_in(answer: Any, count: int) -> list[TierError | None]:
    """Read the answer to a load or a store.

    Args:
        answer: what the tier returned.
        count: number of chunks.

    Returns:
        ``None`` or an error a chunk; an error may still be unreadable (:func:`readable`).

    Raises:
        NonsenseError: it is not as many of those.
    """
    return [
        one if one is None else _each(one, _error, "None or a TierError")
        for one in _items(answer, count)
    ]


def key_in(entry: Any) -> OffloadKey:
    """Read the key of an entry that ``scan`` has yielded.

    Raises:
        NonsenseError: it is no :class:`~kvtier_sdk.Entry`, or has no key.
    """
    return _each(entry, _key, "an Entry with its key")


def usage_in(answer: Any) -> Usage:
    """Read the answer to ``usage``.

    Raises:
        NonsenseError: it is no :class:`~kvtier_sdk.Usage` of plain numbers.
    """
    return _each(answer, _usage, "a Usage of numbers")


def readable(error: BaseException) -> BaseException:
    """Return a tier's error, or what stands for it if it lacks what every :class:`TierError` has.

    A subclass may lack the attributes, have a text that is none, or be false.
    """
    if not isinstance(error, TierError) or _is_readable(error):
        return error
    return TierContractError(
        f"returned a {type(error).__name__} that cannot be read: its text, 'retryable', 'tier' and "
        "'operation' are a TierError's own"
    )


def _is_readable(error: TierError) -> bool:
    try:
        error.tier, error.operation = error.tier, error.operation
        # A text of a class of its own would leave with the results.
        return type(str(error)) is str and error.retryable in (False, True) and bool(error)
    except Exception:
        return False


def text_of(error: BaseException) -> str:
    """Return the text of an exception, which may have none."""
    try:
        return "".join(str(error))
    except Exception:
        return ""


def _items(answer: Any, count: int) -> list[Any]:
    """Return the items of an answer, as many as there are chunks."""
    kind = type(answer).__name__
    try:
        # What a mapping or a set yields has no place in a batch.
        if isinstance(answer, Mapping | Set):
            raise TypeError
        given = len(answer)
        # An object may say one length and have another, or no end.
        items = list(islice(answer, count + 1)) if given == count else []
    except KeyboardInterrupt:
        raise
    except BaseException:
        raise NonsenseError(f"a {kind} for a batch of {count}") from None
    if given != count:
        raise NonsenseError(f"{given} results for a batch of {count}")
    if len(items) != count:
        raise NonsenseError(f"a {kind} of another length than it says")
    return items


def _each(one: Any, read: Callable[[Any], T], what: str) -> T:
    try:
        return read(one)
    except KeyboardInterrupt:
        raise
    except BaseException:
        raise NonsenseError(f"a {type(one).__name__} where {what} belongs") from None


def _boolean(one: Any) -> bool:
    if type(one) in _BOOLEANS:
        return bool(one)
    return {0: False, 1: True}[operator.index(one)]


def _error(one: Any) -> TierError:
    if not issubclass(type(one), TierError):
        raise TypeError
    return one  # type: ignore[no-any-return]


def _usage(answer: Any) -> Usage:
    if type(answer) is not Usage:
        raise TypeError
    chunks, capacity, free = (
        None if number is None else operator.index(number)
        for number in (answer.chunks, answer.capacity_bytes, answer.free_bytes)
    )
    return Usage(chunks, operator.index(answer.used_bytes), capacity, free)


def _key(entry: Any) -> OffloadKey:
    if type(entry) is not Entry or type(entry.key) is not bytes:
        raise TypeError
    return entry.key
