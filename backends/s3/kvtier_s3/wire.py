"""One connection that carries chunks: received into their slots, sent from them, one at a time."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, cast

from kvtier_s3.answers import Answer, AnswerReader, ProtocolError
from kvtier_sdk import Clock, TierError, TierTimeoutError, TierUnavailableError

# What TLS is given at a time; it holds the encrypted copy of that, and no more.
_TLS_PIECE_BYTES = 128 * 1024


class Wire(asyncio.BufferedProtocol):
    """A connection with one request in flight at most.

    Whatever cuts a request short (a cancellation, a broken or a silent peer, an answer that does
    not wait for all of it) closes the connection, at once and for good: then nothing touches the
    request's buffers any more.

    Args:
        peer: the server, for messages.
        clock: for timers.
        silence_s: a request during which no byte moves for so long is cut short.
    """

    def __init__(self, peer: str, clock: Clock, silence_s: float) -> None:
        self.peer = peer
        self._clock = clock
        self._silence_s = silence_s
        self._has_moved = False
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self._descriptor = -1
        self._reader: AnswerReader | None = None
        # Its result is None where the connection broke.
        self._answer: asyncio.Future[Answer | None] | None = None
        # Waits for room to send; done when there is, or nobody will ever read it.
        self._room: asyncio.Future[None] | None = None
        self._paused = False
        self._fault: str | None = None
        self._fault_kind: type[TierError] = TierUnavailableError
        self._spill = memoryview(bytearray(1))

    @property
    def is_usable(self) -> bool:
        """Whether a request can be made now."""
        return self._fault is None and self._answer is None

    async def call(self, parts: Sequence[bytes | memoryview], reader: AnswerReader) -> Answer:
        """Send a request and receive its answer.

        Args:
            parts: the request, sent one after the other.
            reader: takes the answer in.

        Returns:
            The answer. The connection is closed where nothing can follow it.

        Raises:
            TierTimeoutError: no byte moved for too long.
            TierUnavailableError: the connection broke.

        A cancellation closes the connection; when it is raised nothing touches the buffers.
        """
        if not self.is_usable:
            raise self._lost()
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._watch()
        try:
            is_sent = await self._send(parts)
            result: Answer | None = await answer
        except BaseException:
            self.close("a request was given up")
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._answer = self._reader = None
        if result is None:
            raise self._lost()
        if reader.is_last or not is_sent:
            self.close("the server ended it")
        return result

    def close(self, reason: str, kind: type[TierError] = TierUnavailableError) -> None:
        """Cut the connection now; harmless when it is closed.

        Args:
            reason: what the request in flight and later ones are told.
            kind: the error that they get.
        """
        if self._fault is None:
            self._fault = reason
            self._fault_kind = kind
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

    def _lost(self) -> TierError:
        return self._fault_kind(f"connection to {self.peer} lost: {self._fault}")

    def _watch(self) -> None:
        """Look after a while whether something has moved."""
        self._has_moved = False
        self._timer = self._clock.call_at(self._clock.now_s() + self._silence_s, self._look)

    def _look(self) -> None:
        if self._has_moved:
            self._watch()
        else:
            self.close(f"nothing moved for {self._silence_s:g} s", TierTimeoutError)

    # Sending. A transport may copy what it cannot send at once (asyncio's before Python 3.12 does),
    # and it holds the buffers after a cancellation. So plain connections are written to directly,
    # through a second descriptor, since the loop allows nobody at the transport's own.

    def _is_wanted(self) -> bool:
        """Whether the peer still waits for the request."""
        return self._answer is not None and not self._answer.done()

    async def _send(self, parts: Sequence[bytes | memoryview]) -> bool:
        """Send the request; whether all of it was, before an answer came."""
        if self._descriptor >= 0:
            return await self._send_views(deque(memoryview(part) for part in parts if len(part)))
        return await self._send_encrypted(parts)

    async def _send_views(self, views: deque[memoryview]) -> bool:
        while views and self._is_wanted():
            try:
                sent_bytes = os.writev(self._descriptor, views)
            except BlockingIOError:
                await self._writable()
                continue
            except OSError:
                # What was read of an answer that explains it, or the end, is on its way to us.
                return False
            self._has_moved = True
            while views and sent_bytes >= len(views[0]):
                sent_bytes -= len(views.popleft())
            if sent_bytes:
                views[0] = views[0][sent_bytes:]
        return not views

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

    async def _send_encrypted(self, parts: Sequence[bytes | memoryview]) -> bool:
        for part in parts:
            for start in range(0, len(part), _TLS_PIECE_BYTES):
                while self._paused and self._is_wanted():
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
                if self._transport is None or not self._is_wanted():
                    return False
                self._transport.write(part[start : start + _TLS_PIECE_BYTES])
                self._has_moved = True
        return True

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
        self._has_moved = True
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
            self._wake()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(str(exc) if exc is not None else "closed by the server")
