"""The little of Redis's protocol (RESP2) that chunks need: commands out, answers in.

Strict: what is not the canonical form of an expected answer is a broken connection, never a guess
about where the next answer may begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

_END = b"\r\n"
# Longer than any server's error message; what is longer is no line of this protocol.
_LINE_LIMIT_BYTES = 4096
_DIGITS_LIMIT = 20
#: What a peer did that says neither yes nor no nor how much.
NO_ANSWER = "sent what is no answer to a command about a chunk"


class Kind(Enum):
    """What was answered."""

    #: What was asked for is done.
    OK = auto()
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


_OK_LINE = b"+OK"
_OK = Answer(Kind.OK, "OK")
_FILLED = Answer(Kind.FILLED)


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


def rest_of(views: Sequence[bytes | memoryview], count_bytes: int) -> list[bytes | memoryview]:
    """What remains of a vector of buffers once so many bytes of it have moved.

    Args:
        views: the buffers, none of them empty.
        count_bytes: how many have moved.

    Returns:
        The others, the first cut to what is left of it; empty where all have moved.
    """
    for index, view in enumerate(views):
        if count_bytes < len(view):
            return [view[count_bytes:], *views[index + 1 :]]
        count_bytes -= len(view)
    return []


class AnswerReader:
    """Takes answers in: one with its value straight into its buffers, or any number of lines.

    A value of the expected length is received as it comes, its line and its end into places of
    their own, so that one call of the system can take all of it. What turns out to be something
    else may have touched the buffers, as a failed load may.

    Attributes:
        rooms: where the next bytes belong, in order; never empty before the answer is complete.
    """

    def __init__(self) -> None:
        self._text = memoryview(bytearray(_LINE_LIMIT_BYTES))
        self._tail = memoryview(bytearray(len(_END)))
        # The line of a value that fits, and where it is received; chunks are of one length.
        self._value_bytes = -1
        self._line = b""
        self._start = self._text[:0]
        self.expect()

    def expect(self, target: Sequence[memoryview] = ()) -> None:
        """Begin anew, and let go of the last answer's buffers.

        Args:
            target: where the value of one answer goes; it must be exactly so long. Empty for
                answers without values.
        """
        self._took_bytes = 0
        self._may_be_value = bool(target)
        if not target:
            self.rooms: list[Any] = [self._text]
            return
        value_bytes = sum(map(len, target))
        if value_bytes != self._value_bytes:
            self._value_bytes = value_bytes
            self._line = b"$%d\r\n" % value_bytes
            self._start = self._text[: len(self._line)]
        self.rooms = [self._start, *filter(len, target), self._tail]

    def took(self, count_bytes: int) -> list[Answer]:
        """Note that so many bytes were put into :attr:`rooms`.

        Args:
            count_bytes: how many.

        Returns:
            The answers that are complete now. One of ``OTHER_LENGTH`` is the last.

        Raises:
            ProtocolError: this is no answer.
        """
        is_line_read = self._took_bytes >= len(self._line)
        self._took_bytes += count_bytes
        if not self._may_be_value:
            return self._took_text()
        if not is_line_read and not self._is_as_expected():
            self._become_text()
            return self._took_text()
        self.rooms = rest_of(self.rooms, count_bytes)
        if self.rooms:
            return []
        if self._tail != _END:
            raise ProtocolError("sent a value that does not end where it should")
        return [_FILLED]

    def _is_as_expected(self) -> bool:
        if self._took_bytes >= len(self._line):
            return self._start == self._line
        return self._start[: self._took_bytes] == self._line[: self._took_bytes]

    def _become_text(self) -> None:
        """Collect behind the line's beginning what was received beyond it."""
        at = len(self._line)
        for room in self.rooms[1:]:
            piece = room[: max(0, min(self._took_bytes, _LINE_LIMIT_BYTES) - at)]
            self._text[at : at + len(piece)] = piece
            at += len(piece)
        self._may_be_value = False

    def _took_text(self) -> list[Answer]:
        answers = []
        text = bytes(self._text[: self._took_bytes])
        while _END in text:
            line, _, text = text.partition(_END)
            answers.append(_OK if line == _OK_LINE else _answer(line))
            if answers[-1].kind is Kind.OTHER_LENGTH:
                return answers
        if text:
            _check_beginning(text)
            self._text[: len(text)] = text
        self._took_bytes = len(text)
        self.rooms = [self._text[len(text) :]]
        return answers


def _check_beginning(text: bytes) -> None:
    """Complain about what cannot become an answer's line."""
    if text[:1] not in b"-$" and not (_OK_LINE + _END).startswith(text):
        raise ProtocolError(NO_ANSWER)
    if len(text) == _LINE_LIMIT_BYTES:
        raise ProtocolError("sent a line without an end")
    if text[:1] == b"$" and len(text) > _DIGITS_LIMIT:
        raise ProtocolError("sent a length that is no number")


def _answer(line: bytes) -> Answer:
    """The answer of one line."""
    mark, text = line[:1], line[1:].decode(errors="replace")
    if mark == b"-":
        return Answer(Kind.ERROR, text)
    if mark != b"$":
        raise ProtocolError(NO_ANSWER)
    if line == b"$-1":
        return Answer(Kind.ABSENT, text)
    if not (text.isascii() and text.isdigit()):
        raise ProtocolError("sent a length that is no number")
    return Answer(Kind.OTHER_LENGTH, text)
