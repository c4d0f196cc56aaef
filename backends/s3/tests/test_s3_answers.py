"""HTTP, whatever the pieces it comes in, and whatever else may come."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_s3.answers import Answer, AnswerReader, ProtocolError, request_head

LENGTHS = (3, 40)
VALUE = bytes(range(43))


class Slot:
    """Two buffers between guards, which nothing may touch."""

    def __init__(self) -> None:
        self.memory = bytearray(b"g" * 10 + b"\0" * sum(LENGTHS) + b"g" * 10)
        view = memoryview(self.memory)[10:-10]
        self.buffers = (view[: LENGTHS[0]], view[LENGTHS[0] :])

    @property
    def value(self) -> bytes:
        return bytes(self.memory[10:-10])

    def is_guarded(self) -> bool:
        return self.memory[:10] == self.memory[-10:] == b"g" * 10


def head(status: int = 200, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Word", *headers, "", ""]).encode()


def feed(reader: AnswerReader, text: bytes, pieces: list[int]) -> tuple[Answer | None, bytes]:
    """Put text into the reader, at most so much at a time; its answer, and what it did not take."""
    sizes = iter(pieces)
    while text:
        room = reader.room()
        assert len(room) > 0
        count = min(len(room), len(text), next(sizes, len(text)))
        room[:count] = text[:count]
        text = text[count:]
        answer = reader.took(count)
        if answer is not None:
            return answer, text
    return None, b""


PIECES = st.lists(st.integers(1, 12), max_size=60)
FULL = head(200, "Content-Length: 43", "ETag: x") + VALUE


@given(PIECES, st.booleans())
def test_a_body_lands_in_its_buffers(pieces, is_announced):
    slot = Slot()
    reader = AnswerReader(slot.buffers)
    text = head(100) + FULL if is_announced else FULL
    answer, rest = feed(reader, text, pieces)
    assert (answer.status, answer.is_filled, answer.headers["etag"]) == (200, True, "x")
    assert (rest, reader.is_last) == (b"", False)
    assert slot.value == VALUE
    assert slot.is_guarded()


OTHERS = [
    (head(200, "Content-Length: 0"), b"", True),
    (head(404, "Content-Length: 3") + b"abc", b"abc", True),
    (head(404, "content-length:43") + VALUE, VALUE, True),
    (head(200, "Content-Length: 44") + VALUE + b"x", VALUE + b"x", True),
    (head(503, "Transfer-Encoding: chunked") + b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n", b"abc", True),
    (head(503, "Transfer-Encoding: Chunked") + b"1\r\na\r\n0\r\nT: x\r\n\r\n", b"a", True),
    (head(200, "Transfer-Encoding: chunked") + b"2b\r\n" + VALUE + b"\r\n0\r\n\r\n", VALUE, True),
    (head(412, "Content-Length: 1", "Connection: close") + b"a", b"a", False),
    (head(204), b"", True),
    (head(500), b"", False),
    (head(500, "Content-Length: 300000"), b"", False),
    (head(200, "Content-Length: 5000000000"), b"", False),
    (b"HTTP/1.0 403 Forbidden\r\nContent-Length: 1\r\n\r\na", b"a", False),
]


@given(st.sampled_from(OTHERS), st.booleans(), PIECES)
def test_what_is_no_whole_value_touches_nothing(other, is_load, pieces):
    text, body, may_go_on = other
    slot = Slot()
    reader = AnswerReader(slot.buffers if is_load else ())
    answer, rest = feed(reader, text, pieces)
    assert (answer.body, answer.is_filled, rest) == (body, False, b"")
    assert reader.is_last is not may_go_on
    assert slot.value == b"\0" * 43


@given(PIECES)
def test_an_answer_to_head_has_no_body(pieces):
    reader = AnswerReader(has_body=False)
    answer, _ = feed(reader, head(200, "Content-Length: 43"), pieces)
    assert (answer.status, answer.length_bytes, reader.is_last) == (200, 43, False)


@given(st.binary(max_size=60) | st.sampled_from([FULL, FULL[:-1]]), st.binary(), PIECES)
def test_whatever_comes_nothing_is_overrun(start, rest, pieces):
    slot = Slot()
    with contextlib.suppress(ProtocolError):
        feed(AnswerReader(slot.buffers), start + rest, pieces)
    assert slot.is_guarded()


@pytest.mark.parametrize(
    "text",
    [
        b"-ERR unknown command\r\n",
        b"\x15\x03\x01\x00\x02\x02\x50",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n folded: x\r\n\r\n",
        head(200, "Content-Length: x"),
        head(200, "Content-Length: -1"),
        head(200, "Content-Length: " + "9" * 30),
        head(200, "Content-Length: 3", "Content-Length: 4"),
        head(200, "Transfer-Encoding: gzip"),
        head(404, "Transfer-Encoding: chunked") + b"x\r\n",
        head(404, "Transfer-Encoding: chunked") + b"-1\r\n",
        head(404, "Transfer-Encoding: chunked") + b"1\r\nabc\r\n",
        head(404, "Transfer-Encoding: chunked") + b"0\r\n\r\nHTTP",
        head(404, "Content-Length: 1") + b"abc",
        head(200, "Content-Length: 43") + VALUE + b"x",
        head(200, "Content-Length: 0") + b"x",
        head(204) + b"x",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40_000,
    ],
)
def test_what_is_no_answer(text):
    slot = Slot()
    with pytest.raises(ProtocolError):
        feed(AnswerReader(slot.buffers), text, [])
    assert slot.is_guarded()


def test_a_body_in_chunks_without_an_end():
    piece = b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"
    reader = AnswerReader()
    answer, _ = feed(reader, head(500, "Transfer-Encoding: chunked") + piece * 5, [])
    assert (answer.status, answer.body, reader.is_last) == (500, b"", True)


def test_requests():
    assert request_head("GET", "/b/k?x=1", {"host": "h", "a": "b"}) == (
        b"GET /b/k?x=1 HTTP/1.1\r\nhost: h\r\na: b\r\n\r\n"
    )
