"""One connection that carries chunks: received into their slots, sent from them."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtier_redis.answers import (
    NO_ANSWER,
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    rest_of,
)
from kvtier_sdk import TierError, TierUnavailableError

# What TLS is given at a time; it holds the encrypted copy of that, and no more.
_TLS_PIECE_BYTES = 128 * 1024
# Requests under way at once, each of up to four parts: a call takes 1,024 of them (IOV_MAX).
_MOST_AT_ONCE = 128
# What may be answered to a request for a value, and to any other.
_TO_LOADS = (Kind.FILLED, Kind.ABSENT, Kind.OTHER_LENGTH, Kind.ERROR)
_TO_OTHERS = (Kind.OK, Kind.ERROR)
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(slots=True)
class Exchange:
    """A request about one key, and what came of it.

    Attributes:
        name: the server's key.
        parts: the request, sent one after the other; none of them empty.
        target: where a value goes that is exactly so long.
        outcome: the answer, or why there is none; ``None`` before the request was made.
    """

    name: bytes
    parts: Sequence[bytes | memoryview]
    target: Sequence[memoryview] = ()
    outcome: Answer | TierError | None = None


class Wire:
    """A connection that sends requests and takes their answers in that order.

    What has no value for an answer is sent one behind the other without a wait: the fewer turns of
    the event loop and calls of the system, the more chunks. Values are asked for one at a time:
    they are whole when the loop comes to them, and taken by one call, while of several that are on
    their way it takes many calls to collect the pieces.

    Whatever cuts them short (a cancellation, a broken peer) closes the connection, at once
    and for good: then nothing touches their buffers any more.

    Args:
        sock: connected and non-blocking, with TLS where that is spoken; closed with the wire.
        peer: the server, for messages.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer
        self._loop = asyncio.get_running_loop()
        self._pipe = _EncryptedPipe(sock) if isinstance(sock, ssl.SSLSocket) else _Pipe(sock)
        self._reader = AnswerReader()
        self._spill = [memoryview(bytearray(1))]
        self._fault: str | None = None
        # While requests are carried: those to come, and how many more of them.
        self._queue: deque[Exchange] = deque()
        self._left = 0
        self._finished: asyncio.Future[None] | None = None
        # Those under way, what is still to be sent of them, and how often some were sent.
        self._unanswered: deque[Exchange] = deque()
        self._unsent: Sequence[bytes | memoryview] = ()
        self._departures = 0
        self._waits_for_room = False
        self._loop.add_reader(self._pipe.descriptor, self._receive)

    @property
    def is_usable(self) -> bool:
        """Whether a request can be made now."""
        return self._fault is None and self._finished is None

    async def call(
        self, parts: Sequence[bytes | memoryview], target: Sequence[memoryview] = ()
    ) -> Answer:
        """Make one request; :meth:`carry` says what comes of it.

        Args:
            parts: the request, sent one after the other.
            target: where a value goes that is exactly so long.

        Returns:
            The answer.

        Raises:
            TierUnavailableError: the connection broke.
        """
        exchange = Exchange(b"", parts, target)
        await self.carry(deque([exchange]), 1)
        if isinstance(exchange.outcome, Answer):
            return exchange.outcome
        raise exchange.outcome or self._lost()

    async def carry(self, queue: deque[Exchange], most: int) -> None:
        """Make requests, the next as soon as those before are answered.

        No task runs in between: a chunk costs a call to send, or less, and one or two to receive.

        Args:
            queue: what to ask, taken from its left; others may take from it meanwhile.
            most: how many to make.

        Each that was taken has its outcome then. After an answer of another length, and where the
        connection breaks, it is closed and takes no more of them.

        Raises:
            TierUnavailableError: it was closed before, and took none.

        A cancellation closes the connection; when it is raised nothing touches the buffers.
        """
        if not self.is_usable:
            # Not in silence: whoever has a queue to empty would dial for ever.
            raise self._lost()
        self._queue, self._left = queue, most
        finished = self._finished = self._loop.create_future()
        try:
            self._ask_next()
            await finished
        except BaseException:
            self.close("a request was given up")
            raise
        finally:
            self._queue, self._finished = deque(), None

    def close(self, reason: str) -> None:
        """Cut the connection now; harmless when it is closed.

        Args:
            reason: what later requests are told.
        """
        if self._fault is not None:
            return
        self._fault = reason
        self._loop.remove_reader(self._pipe.descriptor)
        self._loop.remove_writer(self._pipe.descriptor)
        self._pipe.close()
        for exchange in self._unanswered:
            exchange.outcome = self._lost()
        self._finish()

    def _lost(self) -> TierUnavailableError:
        return TierUnavailableError(f"connection to {self.peer} lost: {self._fault}")

    def _ask_next(self) -> None:
        under_way = self._unanswered
        while self._queue and self._left and len(under_way) < _MOST_AT_ONCE:
            if under_way and (under_way[0].target or self._queue[0].target):
                break
            under_way.append(self._queue.popleft())
            self._left -= 1
        if not under_way:
            self._finish()
            return
        self._departures += 1
        self._reader.expect(under_way[0].target)
        self._unsent = [part for exchange in under_way for part in exchange.parts]
        self._send()

    def _finish(self) -> None:
        # The buffers go back to whom they belong: nothing here may hold them.
        self._unanswered.clear()
        self._unsent = ()
        self._reader.expect()
        if self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _answered(self, answer: Answer) -> None:
        if answer.kind not in (_TO_LOADS if self._unanswered[0].target else _TO_OTHERS):
            raise ProtocolError(NO_ANSWER)
        self._unanswered.popleft().outcome = answer
        if answer.kind is Kind.OTHER_LENGTH:
            self.close("a value of another length was on its way")
        elif self._unsent and len(self._unsent) > sum(
            len(exchange.parts) for exchange in self._unanswered
        ):
            self.close("the server answered before it was asked")

    # Called by the event loop. A callback that raised would leave the request without an end.

    def _send(self) -> None:
        while self._unsent:
            try:
                sent_bytes = self._pipe.write(self._unsent)
            except _NOT_NOW:
                if not self._waits_for_room:
                    self._waits_for_room = True
                    self._loop.add_writer(self._pipe.descriptor, self._send)
                return
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            self._unsent = rest_of(self._unsent, sent_bytes)
        if self._waits_for_room:
            self._waits_for_room = False
            self._loop.remove_writer(self._pipe.descriptor)

    def _receive(self) -> None:
        departures = self._departures
        while self._fault is None:
            try:
                count_bytes = self._pipe.read(
                    self._reader.rooms if self._unanswered else self._spill
                )
            except _NOT_NOW:
                return
            except OSError as error:
                self.close(error.strerror or str(error))
                return
            try:
                self._received(count_bytes)
            except ProtocolError as error:
                self.close(f"the server {error}")
            # To its end, while more is awaited: of a socket that was reset uvloop tells once.
            has_answered = departures != self._departures or not self._unanswered
            if has_answered and not self._pipe.may_hold_more:
                return

    def _received(self, count_bytes: int) -> None:
        if not count_bytes:
            self.close("closed by the server")
            return
        if not self._unanswered:
            raise ProtocolError("sent what nobody had asked for")
        answers = self._reader.took(count_bytes)
        if len(answers) > len(self._unanswered):
            raise ProtocolError("sent more answers than it was asked for")
        for answer in answers:
            self._answered(answer)
            if self._fault is not None:
                return
        if not self._unanswered:
            self._ask_next()


class _Pipe:
    """The bytes of a socket, in vectors of buffers.

    Attributes:
        descriptor: what the event loop watches.
        may_hold_more: whether there may be bytes to read that the event loop does not see.
    """

    may_hold_more = False

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.descriptor = sock.fileno()

    def read(self, rooms: Sequence[Any]) -> int:
        """Fill what can be filled now; 0 is the end."""
        return os.readv(self.descriptor, rooms)

    def write(self, views: Sequence[bytes | memoryview]) -> int:
        """Send what can be sent now."""
        return os.writev(self.descriptor, views)

    def close(self) -> None:
        self._socket.close()


class _EncryptedPipe(_Pipe):
    may_hold_more = True

    def read(self, rooms: Sequence[Any]) -> int:
        return self._socket.recv_into(rooms[0])

    def write(self, views: Sequence[bytes | memoryview]) -> int:
        return self._socket.send(views[0][:_TLS_PIECE_BYTES])
