"""The little of HTTP/1.1 that chunks need: requests out, one answer in.

What does not say where its body ends is a broken connection, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
# What is read at a time before it is known where the body begins; of a body no more than this is
# moved in memory.
_HEAD_PIECE_BYTES = 2048
_HEAD_LIMIT_BYTES = 32 * 1024
# What an answer may say besides a chunk; longer ones are not listened to.
_BODY_LIMIT_BYTES = 256 * 1024
_NO_BODY = frozenset({204, 304})
_DIGITS_LIMIT = 18


class ProtocolError(Exception):
    """The peer does not speak as an HTTP server does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of the server.

    Attributes:
        status: HTTP's.
        headers: their names in small letters.
        body: what came with it, where that is not in the buffers.
        length_bytes: of the body; ``None`` where the head does not say it.
        is_filled: whether the body is in the buffers.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""
    length_bytes: int | None = None
    is_filled: bool = False


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The head of a request as it goes over the wire.

    Args:
        method: for example ``GET``.
        target: path and query, percent-encoded.
        headers: name to value.

    Returns:
        The bytes.
    """
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


class AnswerReader:
    """Takes one answer in, the body of which goes straight into its buffers.

    Only the body of a 200 that is exactly as long as the buffers does; that of another answer is
    kept, where it is short. One that is long ends the answer, and the connection with it.

    Args:
        target: where the body goes. Empty where none is expected.
        has_body: false for an answer to ``HEAD``, which has none whatever it says.
    """

    def __init__(self, target: Sequence[memoryview] = (), *, has_body: bool = True) -> None:
        self._views = [view for view in target if len(view)]
        self._target_bytes = sum(map(len, self._views))
        self._has_body = has_body
        #: Whether nothing can follow the answer on its connection.
        self.is_last = False
        self._piece = memoryview(bytearray(_HEAD_PIECE_BYTES))
        # What was read of the head, and later of a body that goes nowhere else.
        self._text = bytearray()
        self._head: Answer | None = None
        self._is_chunked = False
        # The view that is being filled, and how far; before that, the text is.
        self._at = -1
        self._filled_bytes = 0

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty before the answer is complete."""
        return self._piece if self._at < 0 else self._views[self._at][self._filled_bytes :]

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
        self._text += self._piece[:count_bytes]
        return self._took_head() if self._head is None else self._took_body(self._head)

    def _took_head(self) -> Answer | None:
        if not b"HTTP/".startswith(self._text[:5]):
            raise ProtocolError("sent what is no answer of HTTP")
        while self._text:
            text, end, rest = self._text.partition(_HEAD_END)
            if len(text) > _HEAD_LIMIT_BYTES:
                raise ProtocolError("sent headers without an end")
            if not end:
                return None
            self._text = rest
            status, headers, is_persistent = _parse_head(text)
            if status >= 200:
                self.is_last = not is_persistent
                return self._begin(status, headers)
            # Only a word in between.
        return None

    def _begin(self, status: int, headers: dict[str, str]) -> Answer | None:
        """The head is complete; see what comes with it."""
        encoding = headers.get("transfer-encoding", "identity").lower()
        self._is_chunked = encoding == "chunked"
        if encoding not in ("identity", "chunked"):
            raise ProtocolError("sent a body in an encoding that nobody asked for")
        length_bytes = None if self._is_chunked else _length_in(headers)
        self._head = head = Answer(status, headers, length_bytes=length_bytes)
        if not self._has_body or status in _NO_BODY or length_bytes == 0:
            if self._text:
                raise ProtocolError("sent more than it said")
            return head
        if self._is_chunked:
            return self._took_body(head)
        if status == 200 and length_bytes == self._target_bytes:
            return self._begin_value(length_bytes)
        if length_bytes is None or length_bytes > _BODY_LIMIT_BYTES:
            # Too long, or as long as the connection lasts: not worth listening to.
            self.is_last = True
            return head
        return self._took_body(head)

    def _begin_value(self, length_bytes: int) -> Answer | None:
        """Move what came with the head to where it belongs; the rest comes there by itself."""
        rest = memoryview(self._text)
        if len(rest) > length_bytes:
            raise ProtocolError("sent more than it said")
        self._at = 0
        answer = None
        while len(rest):
            room = self.room()
            count_bytes = min(len(room), len(rest))
            room[:count_bytes] = rest[:count_bytes]
            rest = rest[count_bytes:]
            answer = self._took_value(count_bytes)
        return answer

    def _took_value(self, count_bytes: int) -> Answer | None:
        self._filled_bytes += count_bytes
        if self._filled_bytes == len(self._views[self._at]):
            self._at += 1
            self._filled_bytes = 0
        if self._at < len(self._views) or self._head is None:
            return None
        return replace(self._head, is_filled=True)

    def _took_body(self, head: Answer) -> Answer | None:
        if self._is_chunked:
            body = _unchunked(bytes(self._text))
        elif head.length_bytes is not None and len(self._text) > head.length_bytes:
            raise ProtocolError("sent more than it said")
        else:
            body = bytes(self._text) if len(self._text) == head.length_bytes else None
        if body is not None:
            return replace(head, body=body)
        if len(self._text) <= _BODY_LIMIT_BYTES:
            return None
        self.is_last = True
        return head


def _parse_head(text: bytearray) -> tuple[int, dict[str, str], bool]:
    """Status, headers, and whether another answer may follow."""
    first, *lines = text.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit()):
        raise ProtocolError("sent what is no answer of HTTP")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise ProtocolError("sent a header that is none")
        value = value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise ProtocolError("sent two lengths")
        headers[name] = value
    is_kept = "close" not in headers.get("connection", "").lower()
    return int(status), headers, is_kept and version == "HTTP/1.1"


def _length_in(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS_LIMIT:
        raise ProtocolError("sent a length that is no number")
    return int(text)


def _unchunked(text: bytes) -> bytes | None:
    """The body that is in chunks; ``None`` as long as its end is missing."""
    parts = []
    while True:
        line, end, text = text.partition(_END)
        if not end:
            return None
        try:
            length_bytes = int(line.partition(b";")[0].strip(), 16)
        except ValueError:
            length_bytes = -1
        if length_bytes < 0:
            raise ProtocolError("sent a length that is no number")
        if length_bytes == 0:
            break
        if len(text) < length_bytes + len(_END):
            return None
        if not text.startswith(_END, length_bytes):
            raise ProtocolError("sent a piece that does not end where it should")
        parts.append(text[:length_bytes])
        text = text[length_bytes + len(_END) :]
    # Further headers may follow, then an empty line.
    if text.startswith(_END):
        trailer, rest = _END, text[len(_END) :]
    else:
        _, trailer, rest = text.partition(_HEAD_END)
    if rest:
        raise ProtocolError("sent more than it said")
    return b"".join(parts) if trailer else None
