"""A tier's calls in flight, which its close waits for."""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvtier_sdk.errors import TierUnavailableError


class RunningCalls:
    """Counts the calls in flight; :meth:`close` refuses new ones and waits for the others.

    A tier may be closed while its calls run. Some client libraries crash the interpreter if they
    are closed during a call, and most raise an exception that explains nothing::

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

    Enter it in the outermost coroutine only: a nested entry is refused while the tier closes. All
    calls are made on one event loop.
    """

    def __init__(self) -> None:
        self._count = 0
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> None:
        """Begin a call; raises :class:`TierUnavailableError` once the tier was closed."""
        if self._is_closed:
            raise TierUnavailableError("the tier was closed", retryable=False)
        self._count += 1
        self._idle.clear()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._count -= 1
        if not self._count:
            self._idle.set()

    async def close(self) -> None:
        """Refuse new calls, and wait for the running ones. A second call is harmless.

        The wait has no time limit, so give each call of the client library one. After a
        cancellation new calls are still refused.
        """
        self._is_closed = True
        await self._idle.wait()
