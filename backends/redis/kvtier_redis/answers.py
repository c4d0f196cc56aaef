"""The little of Redis's protocol (RESP2) that chunks need: commands out, one answer in.

Strict: what is not the canonical form of an expected answer is a broken connection, never a guess
about where the next answer may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

_END = b"\r\n"
# Longer than any server's error message; what is longer is no line of this protocol.
_LINE_LIMIT_BYTES = 4096
_DIGITS_LIMIT = 20


class Kind(Enum):
    """What was answered."""

    #: A status or a number.
    LINE = auto()
    #: The server refused; the text says why.
    ERROR = auto()
    #: There is no such value.
    ABSENT = auto()
    #: The value is in the buffers.
    FILLED = auto()
    #: A value of another length is on its way; the connection is of no more use.
    OTHER_LENGTH = auto()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the server.

    Attributes:
        kind: what it is.
        text: the line without its first character and its end; for a value its length.
    """

    kind: Kind
    text: str = ""


# What an answer begins with, and what its line is then; a value's line is looked at first.
_MARKS = {b"+": Kind.LINE, b":": Kind.LINE, b"-": Kind.ERROR, b"$": Kind.ABSENT}


class ProtocolError(Exception):
    """The peer does not speak as a Redis server does."""


def command(*words: bytes) -> bytes:
    """A short command as it goes over the wire."""
    return b"".join([b"*%d\r\n" % len(words), *map(_bulk, words)])


def set_command(
    name: bytes, buffers: Sequence[memoryview], ttl_ms: int | None
) -> list[bytes | memoryview]:
    """``SET`` whose value is the buffers, one after the other, none of them copied.

    Args:
        name: the server's key.
        buffers: the value.
        ttl_ms: milliseconds after which it is gone; ``None`` for never.

    Returns:
        What to send, in order.
    """
    rest = [] if ttl_ms is None else [b"PX", b"%d" % ttl_ms]
    length_bytes = sum(map(len, buffers))
    head = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (3 + len(rest), _bulk(name), length_bytes)
    return [head, *buffers, b"".join([_END, *map(_bulk, rest)])]


def _bulk(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


class AnswerReader:
    """Takes one answer in, the value of which goes straight into its buffers.

    Args:
        target: where a value goes; it must be exactly so long. Empty where none is expected.
    """

    def __init__(self, target: Sequence[memoryview] = ()) -> None:
        length_bytes = sum(map(len, target))
        self._expected = b"$%d\r\n" % length_bytes if target else b""
        self._line = memoryview(bytearray(_LINE_LIMIT_BYTES))
        self._line_bytes = 0
        self._tail = memoryview(bytearray(len(_END)))
        self._value = [view for view in (*target, self._tail) if len(view)]
        # The view that is being filled, and how far; before that, the line is read.
        self._at = -1
        self._filled_bytes = 0

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty before the answer is complete."""
        if self._at >= 0:
            return self._value[self._at][self._filled_bytes :]
        # Not a byte more than the line of a whole value has: the next one is the value's.
        known_bytes = len(self._expected)
        end = known_bytes if self._line_bytes < known_bytes else _LINE_LIMIT_BYTES
        return self._line[self._line_bytes : end]

    def took(self, count_bytes: int) -> Answer | None:
        """Note that so many bytes were put into :meth:`room`.

        Args:
            count_bytes: how many.

        Returns:
            The answer once it is complete.

        Raises:
            ProtocolError: this is no answer.
        """
        if self._at >= 0:
            return self._took_value(count_bytes)
        self._line_bytes += count_bytes
        line, end, rest = bytes(self._line[: self._line_bytes]).partition(_END)
        if line[:1] not in _MARKS:
            raise ProtocolError("sent what is no answer to a command about a chunk")
        if not end:
            if self._line_bytes == _LINE_LIMIT_BYTES:
                raise ProtocolError("sent a line without an end")
            if line[:1] == b"$" and len(line) > _DIGITS_LIMIT:
                raise ProtocolError("sent a length that is no number")
            return None
        if line + end == self._expected:
            self._at = 0
            return None
        return _answer(line, rest)

    def _took_value(self, count_bytes: int) -> Answer | None:
        self._filled_bytes += count_bytes
        if self._filled_bytes == len(self._value[self._at]):
            self._at += 1
            self._filled_bytes = 0
        if self._at < len(self._value):
            return None
        if self._tail != _END:
            raise ProtocolError("sent a value that does not end where it should")
        return Answer(Kind.FILLED)


def _answer(line: bytes, rest: bytes) -> Answer:
    """The answer of one line, and of what came with it."""
    mark, text = line[:1], line[1:].decode(errors="replace")
    if mark == b"$" and line != b"$-1":
        if not (text.isascii() and text.isdigit()):
            raise ProtocolError("sent a length that is no number")
        return Answer(Kind.OTHER_LENGTH, text)
    if rest:
        raise ProtocolError("sent more than one answer")
    return Answer(_MARKS[mark], text)
