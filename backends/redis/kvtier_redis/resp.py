"""The part of Redis's protocol (RESP2) that is needed for commands about chunks.

Only the canonical form of an expected reply is accepted. After any other reply, the connection is
closed, because the beginning of the next reply is unknown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtier_sdk import Connection, TierError, TierUnavailableError

_END = b"\r\n"
# No server sends a longer line.
_LINE_LIMIT_BYTES = 4096
_DIGITS_LIMIT = 19
_NO_REPLY = "the server sent an invalid reply to a command about a chunk"
#: The maximum number of requests without a reply on a connection.
MOST_AT_ONCE = 128


class Kind(Enum):
    OK = auto()
    ERROR = auto()  # the reply's text is the reason
    ABSENT = auto()  # the server has no value for the key
    VALUE = auto()  # the reply's text is the value's length; a value that fits is in the buffers
    NUMBER = auto()  # the reply's text is a whole number


@dataclass(frozen=True, slots=True)
class Reply:
    """A Redis reply: its kind, and its first line without the type character."""

    kind: Kind
    text: str = ""


_OK = Reply(Kind.OK, "OK")
# The expected kinds of reply to a request for a value.
_TO_LOADS: tuple[Kind, ...] = (Kind.VALUE, Kind.ABSENT, Kind.ERROR)


@dataclass(slots=True)
class Exchange:
    """A request about one key, and its outcome."""

    name: bytes
    parts: Sequence[bytes | memoryview]  # no part is empty
    target: Sequence[memoryview] = ()  # buffers for the requested value; empty for other requests
    guess_bytes: int = 0  # the value's likely length; if its digit count is right, no copy is made
    success: Kind = Kind.OK  # the expected kind of reply, if the request is not for a value
    or_absent: bool = False  # true if ``Kind.ABSENT`` is expected too
    outcome: Reply | TierError | None = None  # ``None`` until the request ends


def command(*words: bytes) -> bytes:
    return b"".join([b"*%d\r\n" % len(words), *map(_bulk, words)])


def set_command(
    name: bytes, buffers: Sequence[memoryview], ttl_ms: int | None
) -> list[bytes | memoryview]:
    """Encode a ``SET`` of the buffers without copying them."""
    rest = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    length_bytes = sum(map(len, buffers))
    head = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (3 + len(rest), _bulk(name), length_bytes)
    return [head, *buffers, b"".join([_END, *map(_bulk, rest)])]


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


async def call(connection: Connection, *words: bytes) -> Reply:
    """Run one command that does not read a chunk's value."""
    exchange = Exchange(b"", [command(*words)])
    await run_some(connection, deque([exchange]), 1)
    if isinstance(exchange.outcome, Reply):
        return exchange.outcome
    raise exchange.outcome or AssertionError("an exchange without an outcome")


async def run_some(connection: Connection, queue: deque[Exchange], most: int) -> None:
    """Run up to ``most`` requests of a queue. After a cancellation, nothing touches the buffers."""
    # Request one value at a time. If several values were requested at once, each system call would
    # receive only a piece of a value. Send other requests together, to save system calls.
    while queue and most:
        batch = [queue.popleft()]
        if not batch[0].target:
            while queue and not queue[0].target and len(batch) < min(most, MOST_AT_ONCE):
                batch.append(queue.popleft())
        most -= len(batch)
        try:
            await _run(connection, batch)
        except TierError as error:
            connection.close(str(error))
            for exchange in batch:
                exchange.outcome = exchange.outcome or error.detached()
        if not connection.is_usable:
            connection.close("the conversation came to an end")
            return


async def _run(connection: Connection, batch: Sequence[Exchange]) -> None:
    """Send requests together, and receive their replies in the same order."""
    parts = [part for exchange in batch for part in exchange.parts]
    unsent = await connection.send(parts)
    later_parts = len(parts)
    for exchange in batch:
        if exchange.target:
            reply, expected = await _receive_value(connection, exchange), _TO_LOADS
        else:
            reply = await _receive_reply(connection)
            expected = (exchange.success, Kind.ERROR, *[Kind.ABSENT] * exchange.or_absent)
        if reply.kind not in expected:
            raise TierUnavailableError(_NO_REPLY)
        exchange.outcome = reply
        later_parts -= len(exchange.parts)
        if len(unsent) > later_parts:
            raise TierUnavailableError("the server replied before it was asked")
        if unsent and not connection.has_unread:
            unsent = await connection.send(unsent)


async def _receive_reply(connection: Connection) -> Reply:
    line = await connection.receive_until(_END, most_bytes=_LINE_LIMIT_BYTES)
    if line == b"+OK\r\n":
        return _OK
    mark, text = line[:1], line[1 : -len(_END)].decode(errors="replace")
    if mark == b"-":
        return Reply(Kind.ERROR, text)
    if mark not in (b"$", b":"):
        raise TierUnavailableError(_NO_REPLY)
    if line == b"$-1\r\n":
        return Reply(Kind.ABSENT, text)
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS_LIMIT):
        raise TierUnavailableError("the server sent an invalid number")
    return Reply(Kind.VALUE if mark == b"$" else Kind.NUMBER, text)


async def _receive_value(connection: Connection, exchange: Exchange) -> Reply:
    """Receive a reply, and store its value in the buffers of the request."""
    # If the line with the value's length is as long as guessed, one system call receives the line
    # and the value in place. An error reply may get into the buffers: a failed load may fill them.
    line = memoryview(bytearray(len(b"$%d\r\n" % exchange.guess_bytes)))
    rooms = [line, *exchange.target, memoryview(bytearray(len(_END)))]
    room_bytes = sum(map(len, rooms))
    got_bytes = room_bytes - sum(map(len, await connection.receive_some(rooms)))
    start, text = len(line), bytes(line)
    if text[:1] == b"$" and text[-2:] == _END and text[1:-2].isdigit():
        reply = Reply(Kind.VALUE, text[1:-2].decode())
    else:
        connection.unread(b"".join(_cut(rooms, 0, got_bytes)))
        reply = await _receive_reply(connection)
        if reply.kind is not Kind.VALUE:
            return reply
        start = got_bytes = 0
        rooms, room_bytes = rooms[1:], room_bytes - len(line)
    end = start + int(reply.text)
    stop = end + len(_END)
    if stop > room_bytes:
        connection.close("a value that is too long was on its way")
        return reply
    if got_bytes < stop:
        await connection.receive(_cut(rooms, got_bytes, stop))
    if got_bytes > stop or b"".join(_cut(rooms, end, stop)) != _END:
        raise TierUnavailableError("the server sent a value of the wrong length")
    return reply


def _cut(views: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    """Return the bytes from ``start`` to ``stop`` of joined views."""
    parts = []
    for view in views:
        if stop > 0 and start < len(view):
            parts.append(view[max(0, start) : stop])
        start, stop = start - len(view), stop - len(view)
    return parts
