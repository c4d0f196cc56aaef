"""Counts a tier's running calls, so that the tier can wait for them when it is closed."""

from __future__ import annotations

import asyncio

from kvtier_sdk.errors import TierUnavailableError


class RunningCalls:
    """A counter of running calls. :meth:`close` refuses new calls and waits for running calls.

    A tier may be closed while its calls run. Some client libraries crash the interpreter if they
    are closed during a call, and most raise a confusing exception::

        class MyTier(ChunkTierManager):
            async def open(self):
                self._calls = RunningCalls()
                self._client = await my_client.connect()

            async def contains_chunk(self, key):
                async with self._calls:
                    return await self._client.exists(key)

            async def close(self):
                await self._calls.close()
                await self._client.close()

    Enter the counter only in the outermost coroutine of a call, because nested entries are refused
    while the tier closes. Make all calls on one event loop.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> None:
        """Count a call; raise :class:`TierUnavailableError` after ``close`` was called."""
        if self._is_closed:
            raise TierUnavailableError("the tier was closed", retryable=False)
        self._count += 1
        self._idle.clear()

    async def __aexit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def close(self) -> None:
        """Refuse new calls, and wait for running calls. A second call is harmless.

        The wait has no time limit, so each call to the client library should have a time limit. If
        the wait is cancelled, new calls are still refused.
        """
        self._is_closed = True
        await self._idle.wait()
