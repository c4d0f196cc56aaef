"""A few connections to each server, made when needed, kept while they are sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from kvtier_redis.wire import Wire

_CLOSED = "the tier was closed"


class Lanes:
    """Up to so many connections to one server, lent one request at a time.

    Args:
        dial: makes a connection.
        limit: how many there are at once.
    """

    def __init__(self, dial: Callable[[], Awaitable[Wire]], limit: int) -> None:
        self._dial = dial
        self._free = asyncio.Semaphore(limit)
        # The one that was used last goes first: it is the one least likely to be stale.
        self._idle: list[Wire] = []
        self._is_closed = False

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[Wire]:
        """Borrow a connection, waiting for one where all are lent.

        Yields:
            A usable connection, which comes back unless it broke.

        Raises:
            TierError: none could be made.
        """
        async with self._free:
            wire = self._take() or await self._dial()
            try:
                yield wire
            finally:
                if self._is_closed:
                    wire.close(_CLOSED)
                elif wire.is_usable:
                    self._idle.append(wire)

    def _take(self) -> Wire | None:
        while self._idle:
            wire = self._idle.pop()
            if wire.is_usable:
                return wire
        return None

    def close(self) -> None:
        """Cut the connections, those that are lent when they come back."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close(_CLOSED)
