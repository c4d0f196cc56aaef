"""A few connections to a server, made when needed, kept while they are sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

_CLOSED = "the tier was closed"


class Connection(Protocol):
    """What a pool has to know of a connection."""

    @property
    def is_usable(self) -> bool:
        """Whether it can be lent."""

    def close(self, reason: str, /) -> None:
        """Cut it, at once; harmless when it is cut already.

        Args:
            reason: what a call that is under way on it is told.
        """


C = TypeVar("C", bound=Connection)


class ConnectionPool(Generic[C]):
    """Up to so many connections to one server, each lent to one borrower at a time.

    Of more than one, stores have half at most: requests wait for lookups and loads, and nobody
    waits for a store. All of it on one loop.

    Args:
        dial: makes a connection; called only while fewer than ``limit`` are lent.
        limit: how many there are at once.
    """

    def __init__(self, dial: Callable[[], Awaitable[C]], limit: int) -> None:
        self._dial = dial
        self._free = asyncio.Semaphore(limit)
        # A store takes its place in the line when it is its turn to store: behind reads that wait.
        self._stores = asyncio.Semaphore(max(1, limit // 2))
        # The one that was used last goes first: it is the one least likely to be stale.
        self._idle: list[C] = []
        self._is_closed = False

    @asynccontextmanager
    async def borrow(self, *, for_store: bool = False) -> AsyncIterator[C]:
        """Borrow a connection, waiting for one where all are lent.

        Args:
            for_store: whether it is for a store, so that half of them are left to others.

        Yields:
            A usable connection. It is kept for others afterwards if it is usable still.

        Raises:
            BaseException: what ``dial`` raised.

        After a cancellation somebody else can borrow. A borrower that is interrupted in the middle
        of a call has to cut the connection itself: the pool cannot tell.
        """
        async with self._stores if for_store else nullcontext(), self._free:
            connection = self._take() or await self._dial()
            try:
                yield connection
            finally:
                if self._is_closed:
                    connection.close(_CLOSED)
                elif connection.is_usable:
                    self._idle.append(connection)

    def close(self) -> None:
        """Cut the connections, those that are lent when they come back. Twice is harmless."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close(_CLOSED)

    def _take(self) -> C | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None
