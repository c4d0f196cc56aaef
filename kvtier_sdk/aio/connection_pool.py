"""A pool of connections to one server, opened when needed and reused while usable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

_CLOSED = "the tier was closed"


class _Poolable(Protocol):
    """A pool's connection, which need not be a :class:`Connection`."""

    @property
    def is_usable(self) -> bool: ...

    def close(self, reason: str, /) -> None: ...


C = TypeVar("C", bound=_Poolable)


class ConnectionPool(Generic[C]):
    """Up to ``limit`` connections to one server, each lent to one borrower at a time.

    If there are several, stores get at most half of them: requests wait for lookups and loads, but
    not for stores. All calls are made on one event loop::

        pool = ConnectionPool(
            lambda: Connection.connect(("kv-1", 7000), clock=clock, timeout_s=2.0), limit=4
        )
        async with pool.borrow() as connection:
            await connection.send([b"GET\\n"])
            await connection.receive(transfer.buffers)

    Args:
        dial: opens a connection: a :class:`Connection`, or any object with ``is_usable`` and
            ``close(reason)``. Called only while fewer than ``limit`` are lent.
        limit: the maximum number of connections.
    """

    def __init__(self, dial: Callable[[], Awaitable[C]], limit: int) -> None:
        self._dial = dial
        self._free = asyncio.Semaphore(limit)
        # A store waits here first, so it queues for a connection behind the reads already waiting.
        self._stores = asyncio.Semaphore(max(1, limit // 2))
        # The connection used last is lent first: it is the least likely to be stale.
        self._idle: list[C] = []
        self._is_closed = False

    @asynccontextmanager
    async def borrow(self, *, for_store: bool = False) -> AsyncIterator[C]:
        """Borrow a connection, waiting while all are lent.

        Args:
            for_store: true for a store; stores leave half of the connections to other calls.

        A connection that is still usable after the block is kept for the next borrower. A block
        that raises, or is cancelled, closes the connection: it may have stopped in the middle of a
        conversation, and the next borrower would receive the rest. An error that leaves the
        connection sound should be raised after the block.
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
        """Close idle connections now, and lent connections on return. A second call is harmless."""
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
