"""A batch is divided among servers; its results keep the batch's order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from kvtier_sdk import SystemClock, TierError, TierUnavailableError, call_by_shard

BATCH = [5, 3, 8, 1, 4, 7]


def parity(number: int) -> str:
    return "odd" if number % 2 else "even"


async def test_results_stand_at_the_places_of_their_items():
    asked: list[tuple[str, list[int]]] = []

    async def call(shard: str, items: Sequence[int]) -> list[int]:
        asked.append((shard, list(items)))
        return [10 * item for item in items]

    results = await call_by_shard(SystemClock(), BATCH, parity, call)
    assert results == [10 * item for item in BATCH]
    assert asked == [("odd", [5, 3, 1, 7]), ("even", [8, 4])]


async def test_all_shards_are_called_at_once():
    together = asyncio.Barrier(2)

    async def call(shard: str, items: Sequence[int]) -> Sequence[int]:
        await together.wait()
        return items

    assert await call_by_shard(SystemClock(), BATCH, parity, call) == BATCH


async def test_a_shard_that_is_down_fails_its_own_items():
    async def call(shard: str, items: Sequence[int]) -> Sequence[int]:
        if shard == "odd":
            raise TierUnavailableError("no route")
        return items

    results = await call_by_shard(SystemClock(), BATCH, parity, call)
    assert [one if isinstance(one, int) else str(one) for one in results] == [
        "no route",
        "no route",
        8,
        "no route",
        4,
        "no route",
    ]
    (error, *_) = results
    assert isinstance(error, TierError)
    assert error.__traceback__ is None, "it would hold the buffers of the call"


async def test_an_empty_batch_calls_nobody():
    assert await call_by_shard(SystemClock(), [], parity, pytest.fail) == []


async def test_another_number_of_results_is_an_error():
    async def call(shard: str, items: Sequence[int]) -> Sequence[int]:
        return items[1:]

    with pytest.raises(ValueError):
        await call_by_shard(SystemClock(), BATCH, parity, call)
