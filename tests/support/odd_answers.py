from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from kvtier_sdk import TierError


async def _wait() -> None:
    await asyncio.sleep(0)


def _coroutines(count: int) -> list[Any]:
    made = [_wait() for _ in range(count)]
    for coroutine in made:
        coroutine.close()  # avoids a warning that the coroutine was never awaited
    return made


#: Invalid lookup results and verdicts for a batch of ``count`` keys.
NONSENSE: dict[str, Callable[[int], Any]] = {
    "nothing": lambda count: None,
    "a number": lambda count: 1,
    "a text": lambda count: "y" * count,
    "a mapping": lambda count: dict.fromkeys(range(count)),
    "a set": lambda count: set(range(count)),
    "a generator": lambda count: (None for _ in range(count)),
    "a coroutine": lambda count: _coroutines(1)[0],
    "one too few": lambda count: [None] * (count - 1),
    "one too many": lambda count: deque([None] * (count + 1)),
    "coroutines": _coroutines,
    "futures": lambda count: [asyncio.get_running_loop().create_future() for _ in range(count)],
    "texts": lambda count: ["True"] * count,
    "fractions": lambda count: [1.0] * count,
    "numbers": lambda count: [2] * count,
    "classes": lambda count: [TierError] * count,
    "numpy's fractions": lambda count: np.ones(count),
    "a table": lambda count: np.ones((count, 1), bool),
    "a scalar": lambda count: np.array(True),
}


class HalfMadeError(TierError):
    def __init__(self, code: int) -> None:
        self.code = code
