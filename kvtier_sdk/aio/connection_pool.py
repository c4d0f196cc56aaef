"""A pool that opens connections to one server on demand, and reuses them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Generic, Protocol, TypeVar

from kvtier_sdk.errors import TierUnavailableError

_CLOSED = "the tier was closed"


class _Poolable(Protocol):
    @property
    def is_usable(self) -> bool: ...

    def close(self, reason: str, /) -> None: ...


C = TypeVar("C", bound=_Poolable)


class ConnectionPool(Generic[C]):
    """A pool of up to ``limit`` connections to one server, each lent to one borrower at a time.

    Stores get at most half of the connections (at least one), because requests wait for lookups and
    loads, but not for stores. Make all calls on one event loop::

        pool = ConnectionPool(
            lambda: Connection.connect(("kv-1", 7000), clock=clock, timeout_s=2.0), limit=4
        )
        async with pool.borrow() as connection:
            await connection.send([b"GET\\n"])
            await connection.receive(transfer.buffers)

    Args:
        dial: a function that opens a :class:`Connection`, or any object with ``is_usable`` and
            ``close(reason)``. The pool calls ``dial`` only while fewer than ``limit`` are lent.
        limit: the maximum number of connections.
    """

    def __init__(self, dial: Callable[[], Awaitable[C]], limit: int) -> None:
        self._dial = dial
        self._free = asyncio.Semaphore(limit)
        # Stores wait here before they enter the common queue, so that they cannot fill that queue.
        self._stores = asyncio.Semaphore(max(1, limit // 2))
        # A stack, because the most recently used connection is the least likely to be stale.
        self._idle: list[C] = []
        self._is_closed = False

    @asynccontextmanager
    async def borrow(self, *, for_store: bool = False) -> AsyncIterator[C]:
        """Borrow a connection; wait while all connections are lent.

        If ``for_store`` is true, also wait while stores use half of the connections. If the
        connection is still usable after the ``async with`` block, the pool keeps it for the next
        borrower. If the block raises or is cancelled, the pool closes the connection, because the
        next borrower might receive the rest of an unfinished reply. After a
        :class:`TierUnavailableError` the pool closes its idle connections too. To keep the
        connection after an error that does not affect it, raise the error after the block.
        """
        async with self._stores if for_store else nullcontext(), self._free:
            connection = self._take() or await self._dial()
            try:
                yield connection
            except BaseException as error:
                connection.close("its borrower failed")
                if isinstance(error, TierUnavailableError):
                    # Idle connections are older, so the server has probably lost them too.
                    self._close_idle("another connection was lost")
                raise
            if self._is_closed:
                connection.close(_CLOSED)
            elif connection.is_usable:
                self._idle.append(connection)
            else:
                connection.close("it was left in the middle of a conversation")

    def close(self) -> None:
        """Close idle connections now, and lent connections when they return."""
        self._is_closed = True
        self._close_idle(_CLOSED)

    def _close_idle(self, reason: str) -> None:
        while self._idle:
            self._idle.pop().close(reason)

    def _take(self) -> C | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.close("it went stale")
        return None
