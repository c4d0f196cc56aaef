"""A few connections to a server, made when needed, kept while they are sound."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

_CLOSED = "the tier was closed"


class _Poolable(Protocol):
    """The interface of a pool's connections, which need not be :class:`Connection` objects."""

    @property
    def is_usable(self) -> bool:
        """True if it can be lent."""

    def close(self, reason: str, /) -> None:
        """Close it, at once; harmless if it is closed."""


C = TypeVar("C", bound=_Poolable)


class ConnectionPool(Generic[C]):
    """Up to so many connections to one server, each lent to one borrower at a time.

    Of more than one, stores have half at most: requests wait for lookups and loads, but not for
    stores. All of it on one loop::

        pool = ConnectionPool(
            lambda: Connection.connect(("kv-1", 7000), clock=clock, timeout_s=2.0), limit=4
        )
        async with pool.borrow() as connection:
            await connection.send([b"GET\\n"])
            await connection.receive(transfer.buffers)

    Args:
        dial: makes a connection; called only while fewer than ``limit`` are lent. What it makes is
            a :class:`Connection`, or any object with ``is_usable`` and ``close(reason)``.
        limit: the most connections at once.
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
        """Borrow a connection, waiting for one while all are lent.

        Args:
            for_store: whether it is for a store, so that half of them are left to others.

        Yields:
            A usable connection. It is kept for others afterwards if it is still usable.

        Raises:
            BaseException: what ``dial`` raised, or the block.

        A block that raises, or is cancelled, closes the connection: it may have stopped in the
        middle of a conversation, and the next borrower would receive the rest. Raise an error that
        leaves the connection sound after the block. After a cancellation the place is free.
        """
        async with self._stores if for_store else nullcontext(), self._free:
            connection = self._take() or await self._dial()
            try:
                yield connection
            except BaseException:
                connection.close("its borrower failed")
                raise
            if self._is_closed:
                connection.close(_CLOSED)
            elif connection.is_usable:
                self._idle.append(connection)
            else:
                connection.close("it was left in the middle of a conversation")

    def close(self) -> None:
        """Close the connections, those that are lent when they come back. Twice is harmless."""
        self._is_closed = True
        while self._idle:
            self._idle.pop().close(_CLOSED)

    def _take(self) -> C | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close("it went stale")
        return None
