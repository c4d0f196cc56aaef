"""One connection that carries chunks: received into their slots, sent from them, one at a time."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from kvtier_redis.answers import Answer, AnswerReader, Kind, ProtocolError
from kvtier_sdk import TierUnavailableError

# What TLS is given at a time; it holds the encrypted copy of that, and no more.
_TLS_PIECE_BYTES = 128 * 1024


class Wire(asyncio.BufferedProtocol):
    """A connection with one request in flight at most.

    Whatever cuts a request short (a cancellation, a broken peer) closes the connection, at once
    and for good: then nothing touches the request's buffers any more.

    Args:
        peer: the server, for messages.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._reader: AnswerReader | None = None
        # Its result is None where the connection broke.
        self._answer: asyncio.Future[Answer | None] | None = None
        # Waits for room to send; done when there is, or nobody will ever read it.
        self._room: asyncio.Future[None] | None = None
        self._paused = False
        self._fault: str | None = None
        self._spill = memoryview(bytearray(1))

    @property
    def is_usable(self) -> bool:
        """Whether a request can be made now."""
        return self._fault is None and self._answer is None

    async def call(
        self, parts: Sequence[bytes | memoryview], target: Sequence[memoryview] = ()
    ) -> Answer:
        """Send a request and receive its answer.

        Args:
            parts: the request, sent one after the other.
            target: where a value goes that is exactly so long.

        Returns:
            The answer. After one of another length the connection is closed.

        Raises:
            TierUnavailableError: the connection broke.

        A cancellation closes the connection; when it is raised nothing touches the buffers.
        """
        if not self.is_usable:
            raise self._lost()
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._reader = AnswerReader(target)
        try:
            await self._send(parts)
            result: Answer | None = await answer
        except BaseException:
            self.close("a request was given up")
            raise
        finally:
            self._answer = self._reader = None
        if result is None:
            raise self._lost()
        if result.kind is Kind.OTHER_LENGTH:
            self.close("a value of another length was on its way")
        return result

    def close(self, reason: str) -> None:
        """Cut the connection now; harmless when it is closed.

        Args:
            reason: what later requests are told.
        """
        if self._fault is None:
            self._fault = reason
        self._wake()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
        self._reader = None
        if self._descriptor >= 0:
            asyncio.get_running_loop().remove_writer(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1
        if self._transport is not None:
            self._transport.abort()

    def _lost(self) -> TierUnavailableError:
        return TierUnavailableError(f"connection to {self.peer} lost: {self._fault}")

    # Sending. A transport may copy what it cannot send at once (asyncio's before Python 3.12 does),
    # and it holds the buffers after a cancellation. So plain connections are written to directly,
    # through a second descriptor, since the loop allows nobody at the transport's own.

    async def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        if self._descriptor >= 0:
            await self._send_views(deque(memoryview(part) for part in parts if len(part)))
        else:
            await self._send_encrypted(parts)

    async def _send_views(self, views: deque[memoryview]) -> None:
        while views and self._fault is None:
            try:
                sent_bytes = os.writev(self._descriptor, views)
            except BlockingIOError:
                await self._writable()
                continue
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            while views and sent_bytes >= len(views[0]):
                sent_bytes -= len(views.popleft())
            if sent_bytes:
                views[0] = views[0][sent_bytes:]

    async def _writable(self) -> None:
        loop = asyncio.get_running_loop()
        self._room = loop.create_future()
        loop.add_writer(self._descriptor, self._wake)
        try:
            await self._room
        finally:
            self._room = None
            if self._descriptor >= 0:
                loop.remove_writer(self._descriptor)

    async def _send_encrypted(self, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            for start in range(0, len(part), _TLS_PIECE_BYTES):
                while self._paused and self._fault is None:
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if self._fault is not None or self._transport is None:
                    return
                self._transport.write(part[start : start + _TLS_PIECE_BYTES])

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not isinstance: uvloop's is none by inheritance.
        self._transport = cast(asyncio.Transport, transport)
        if transport.get_extra_info("ssl_object") is None:
            self._descriptor = os.dup(transport.get_extra_info("socket").fileno())

    def get_buffer(self, sizehint: int) -> Any:
        return self._spill if self._reader is None else self._reader.room()

    def buffer_updated(self, nbytes: int) -> None:
        if self._reader is None or self._answer is None or self._answer.done():
            self.close("the server sent what nobody had asked for")
            return
        try:
            answer = self._reader.took(nbytes)
        except ProtocolError as error:
            self.close(f"the server {error}")
            return
        if answer is not None:
            self._reader = None
            self._answer.set_result(answer)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(str(exc) if exc is not None else "closed by the server")
