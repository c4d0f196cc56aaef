"""Divides a batch among servers, with one call per server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import TierError

T = TypeVar("T")
ItemT = TypeVar("ItemT")
ShardT = TypeVar("ShardT", bound=Hashable)


async def call_by_shard(
    clock: Clock,
    items: Sequence[ItemT],
    shard_of: Callable[[ItemT], ShardT],
    call: Callable[[ShardT, Sequence[ItemT]], Awaitable[Sequence[T]]],
) -> list[T | TierError]:
    """Divide a batch by server, call all servers at once, and return the results in order.

    An unreachable server fails only its own items::

        async def load(self, batch):
            return await call_by_shard(self.context.clock, batch, self._server_of, self._load_from)

        async def _load_from(self, server, transfers):
            ...  # one verdict per transfer, or a TierError for all of them

    ``shard_of`` returns the shard of one of the ``items``, such as a key's server. ``call`` is
    called once per shard, in a task of the ``clock``, with the shard and its items in order. It
    must return one result per item; a wrong number raises ValueError. If it raises a
    :class:`TierError`, the error is the result of each of the shard's items.

    When this function has returned or raised, no call runs any more.
    """
    places: dict[ShardT, list[int]] = {}
    for place, item in enumerate(items):
        places.setdefault(shard_of(item), []).append(place)
    results: list[T | TierError | None] = [None] * len(items)

    async def ask(shard: ShardT, own: Sequence[int]) -> None:
        try:
            answers: Sequence[T | TierError] = await call(shard, [items[place] for place in own])
        except TierError as error:
            answers = [error.detached()] * len(own)
        for place, answer in zip(own, answers, strict=True):
            results[place] = answer

    calls = [partial(ask, shard, own) for shard, own in places.items()]
    await clock.gather_bounded(calls, limit=len(calls))
    return results  # type: ignore[return-value]  # every place was filled
