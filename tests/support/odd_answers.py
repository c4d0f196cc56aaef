"""Answers that a tier may not give, and objects that raise where they are looked at."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np

from kvtier_sdk import TierError


def _raise(*_: Any) -> Any:
    raise RuntimeError("do not look")


class Hostile:
    """Raises whatever is asked of it."""

    __bool__ = __len__ = __iter__ = __eq__ = __hash__ = __index__ = __int__ = _raise
    __repr__ = __str__ = __format__ = _raise


class HostileInt(int):
    """An integer that cannot be compared."""

    __bool__ = __eq__ = __hash__ = __index__ = __int__ = __str__ = _raise  # type: ignore[assignment]


class HostileText(str):
    """A text that cannot be compared."""

    __eq__ = __hash__ = __contains__ = __str__ = __format__ = encode = _raise  # type: ignore[assignment]


class HostileKey(bytes):
    """A key that cannot be compared."""

    __eq__ = __hash__ = __bytes__ = _raise  # type: ignore[assignment]


class Sized:
    """As long as it says, whatever comes when it is iterated.

    Args:
        length: what it says; an exception is raised.
        items: what comes.
    """

    def __init__(self, length: Any, items: Any) -> None:
        self._length = length
        self._items = items

    def __len__(self) -> int:
        if isinstance(self._length, BaseException):
            raise self._length
        return self._length  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._items, BaseException):
            raise self._items
        return iter(self._items)


class SilentError(TierError):
    """An error without a text."""

    __str__ = _raise


class HostileTextError(TierError):
    """An error whose text cannot be compared."""

    def __str__(self) -> str:
        return HostileText("gone")


class FalseError(TierError):
    """An error that seems to be none."""

    def __bool__(self) -> bool:
        return False


class HalfMadeError(TierError):
    """An error whose author forgot the base class."""

    def __init__(self, code: int) -> None:
        self.code = code


class SealedError(TierError):
    """An error that cannot be signed."""

    sealed = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.sealed = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self.sealed:
            raise AttributeError("sealed")
        super().__setattr__(name, value)


async def _wait() -> None:
    await asyncio.sleep(0)


def _coroutines(count: int) -> list[Any]:
    made = [_wait() for _ in range(count)]
    for coroutine in made:
        coroutine.close()  # nothing is to warn that it was never awaited
    return made


#: Answers to a batch of so many keys that are neither answers of a lookup nor verdicts.
NONSENSE: dict[str, Callable[[int], Any]] = {
    "nothing": lambda count: None,
    "a number": lambda count: 1,
    "a text": lambda count: "y" * count,
    "a mapping": lambda count: dict.fromkeys(range(count)),
    "a mapping of answers": lambda count: MappingProxyType({bool(n): None for n in range(count)}),
    "a set": lambda count: set(range(count)),
    "a generator": lambda count: (None for _ in range(count)),
    "an endless generator": lambda count: itertools.repeat(None),
    "one too few": lambda count: [None] * (count - 1),
    "one too many": lambda count: deque([None] * (count + 1)),
    "coroutines": _coroutines,
    "futures": lambda count: [asyncio.get_running_loop().create_future() for _ in range(count)],
    "texts": lambda count: ["True"] * count,
    "fractions": lambda count: [1.0] * count,
    "numbers": lambda count: [2] * count,
    "classes": lambda count: [TierError] * count,
    "hostile objects": lambda count: [Hostile()] * count,
    "numpy's fractions": lambda count: np.ones(count),
    "numpy's texts": lambda count: np.array(["y"] * count),
    "numpy's dates": lambda count: np.zeros(count, "datetime64[s]"),
    "a table": lambda count: np.ones((count, 1), bool),
    "a scalar": lambda count: np.array(True),
    "a hostile object": lambda count: Hostile(),
    "no length": lambda count: Sized(RuntimeError("no"), [None] * count),
    "an odd length": lambda count: Sized("three", [None] * count),
    "no end": lambda count: Sized(count, itertools.repeat(None)),
    "a lie": lambda count: Sized(count, [None] * (count - 1)),
    "no beginning": lambda count: Sized(count, RuntimeError("no")),
    "an exit": lambda count: Sized(count, SystemExit(3)),
    "a cancellation": lambda count: Sized(count, asyncio.CancelledError()),
}
#: Errors that are of the right class and cannot be read.
UNREADABLE: dict[str, Callable[[], TierError]] = {
    "silent": lambda: SilentError("x"),
    "hostile text": lambda: HostileTextError("x"),
    "false": lambda: FalseError("x"),
    "half made": lambda: HalfMadeError(3),
    "sealed": lambda: SealedError("x"),
}
