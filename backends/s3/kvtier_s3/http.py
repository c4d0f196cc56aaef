"""The part of HTTP/1.1 that the tier needs: one request, then its response.

If a response does not state the end of its body, the beginning of the next response is unknown.
The connection is then closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvtier_sdk import Connection, TierUnavailableError

_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_HEAD_LIMIT_BYTES = 32 * 1024
_LINE_LIMIT_BYTES = 1024
# Maximum length of a body that is not received into a chunk's buffers. The overhead of HTTP's
# chunked encoding counts too.
_BODY_LIMIT_BYTES = 64 * 1024
_NO_BODY = frozenset({204, 304})
_DIGITS_LIMIT = 18


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response. ``length_bytes`` is the body's length; ``None`` if no header gives it."""

    status: int
    headers: Mapping[str, str]  # the names are in lower case
    body: bytes = b""  # empty if the body is in the buffers or was not read to its end
    length_bytes: int | None = None


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {target} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


async def request(
    connection: Connection,
    parts: Sequence[bytes | memoryview],
    target: Sequence[memoryview] = (),
    *,
    has_body: bool = True,
) -> Response:
    """Make a request. If the status is 200 and the body fits, ``target`` receives the body."""
    # Ignore unsent buffers, because a server may refuse a request before receiving all of it.
    await connection.send(parts)
    status = 0
    while status < 200:  # 1xx only announces the response
        head = await connection.receive_until(_HEAD_END, most_bytes=_HEAD_LIMIT_BYTES)
        status, headers, is_persistent = _parse_head(head.removesuffix(_HEAD_END))
    encoding = headers.get("transfer-encoding", "identity").lower()
    if encoding not in ("identity", "chunked"):
        raise _nonsense("a body in an encoding that was not asked for")
    is_chunked = encoding == "chunked"
    length_bytes = None if is_chunked else _length_in(headers)
    body: bytes | None = b""
    if has_body and status not in _NO_BODY and length_bytes != 0:
        if is_chunked:
            body = await _receive_chunked(connection)
        elif status == 200 and length_bytes and length_bytes <= sum(map(len, target)):
            await connection.receive(_first(length_bytes, target))
        else:
            body = await _receive_body(connection, length_bytes)
    if connection.has_unread and body is not None:
        raise _nonsense("more than it said")
    if body is None or not is_persistent:
        connection.close("the server ended it")
    return Response(status, headers, body or b"", length_bytes)


def _first(size_bytes: int, buffers: Sequence[memoryview]) -> list[memoryview]:
    """Return views of the first ``size_bytes`` bytes across all buffers."""
    parts = []
    for buffer in buffers:
        parts.append(buffer[:size_bytes])
        size_bytes -= len(parts[-1])
    return parts


async def _receive_body(connection: Connection, length_bytes: int | None) -> bytes | None:
    """Receive a body; return ``None`` if it is too long or its length is unknown."""
    if length_bytes is None or length_bytes > _BODY_LIMIT_BYTES:
        return None
    # Allow one byte more than the stated length, to detect a body that is too long.
    body = bytearray(length_bytes + 1)
    rest: Sequence[memoryview] = [memoryview(body)]
    while sum(map(len, rest)) > 1:
        rest = await connection.receive_some(rest)
    if not rest:
        raise _nonsense("more than it said")
    return bytes(body[:-1])


async def _receive_chunked(connection: Connection) -> bytes | None:
    """Receive a chunked body; return ``None`` if it is too long."""
    pieces: list[bytearray] = []
    left_bytes = _BODY_LIMIT_BYTES
    while True:
        line = await _receive_line(connection)
        piece_bytes = _piece_length(line)
        left_bytes -= len(line) + piece_bytes + len(_LINE_END)
        if left_bytes < 0:
            return None
        if not piece_bytes:
            break
        piece = bytearray(piece_bytes + len(_LINE_END))
        await connection.receive([memoryview(piece)])
        if not piece.endswith(_LINE_END):
            raise _nonsense("a piece of the wrong length")
        pieces.append(piece[:piece_bytes])
    # Skip the headers that may follow, up to the empty line that ends the body.
    while (line := await _receive_line(connection)) != _LINE_END:
        left_bytes -= len(line)
        if left_bytes < 0:
            return None
    return b"".join(pieces)


async def _receive_line(connection: Connection) -> bytes:
    return await connection.receive_until(_LINE_END, most_bytes=_LINE_LIMIT_BYTES)


def _piece_length(line: bytes) -> int:
    try:
        length_bytes = int(line.partition(b";")[0].strip(), 16)
    except ValueError:
        length_bytes = -1
    if length_bytes < 0:
        raise _nonsense("an invalid length")
    return length_bytes


def _nonsense(what: str) -> TierUnavailableError:
    return TierUnavailableError(f"the server sent {what}")


def _parse_head(text: bytes) -> tuple[int, dict[str, str], bool]:
    """Return the status, the headers, and true if the connection can serve another request."""
    first, *lines = text.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit()):
        raise _nonsense("an invalid HTTP response")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise _nonsense("an invalid header")
        value = value.strip()
        if name == "content-length" and headers.get(name, value) != value:
            raise _nonsense("two lengths")
        headers[name] = value
    is_kept = "close" not in headers.get("connection", "").lower()
    return int(status), headers, is_kept and version == "HTTP/1.1"


def _length_in(headers: Mapping[str, str]) -> int | None:
    text = headers.get("content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > _DIGITS_LIMIT:
        raise _nonsense("an invalid length")
    return int(text)
