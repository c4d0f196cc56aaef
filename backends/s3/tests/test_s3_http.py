import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guarded import GuardedBuffers
from support.peer import converse

from kvtier_s3.http import request, request_head
from kvtier_sdk import TierUnavailableError

LENGTHS = (3, 40)
VALUE = bytes(range(43))


def head(status: int = 200, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} Word", *headers, "", ""]).encode()


def receive(text: bytes, pieces=(), slot: GuardedBuffers | None = None, *, has_body: bool = True):
    async def talk(connection):
        target = () if slot is None else slot.buffers
        response = await request(connection, [b"GET"], target, has_body=has_body)
        return response, connection.is_usable

    return converse(talk, text, pieces)


PIECES = st.lists(st.integers(1, 12), max_size=20)
FULL = head(200, "Content-Length: 43", "ETag: x") + VALUE


@given(PIECES, st.booleans(), st.integers(1, 43))
def test_a_body_lands_in_its_buffers(pieces, is_announced, length_bytes):
    slot = GuardedBuffers(*LENGTHS)
    text = head(200, f"Content-Length: {length_bytes}", "ETag: x") + VALUE[:length_bytes]
    response, is_usable = receive(head(100) + text if is_announced else text, pieces, slot)
    assert (response.status, response.body, response.headers["etag"]) == (200, b"", "x")
    assert (response.length_bytes, is_usable) == (length_bytes, True)
    assert slot.content == VALUE[:length_bytes] + bytes(43 - length_bytes)
    assert slot.is_guarded()


@given(PIECES, st.integers(1, 43), st.data())
def test_a_body_that_is_cut_is_an_error(pieces, length_bytes, data):
    sent_bytes = data.draw(st.integers(0, length_bytes - 1))
    text = head(200, f"Content-Length: {length_bytes}") + VALUE[:sent_bytes]
    with pytest.raises(TierUnavailableError):
        receive(text, pieces, GuardedBuffers(*LENGTHS))


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
    slot = GuardedBuffers(*LENGTHS)
    response, is_usable = receive(text, pieces, slot if is_load else None)
    assert response.body == body
    assert may_go_on or not is_usable
    assert slot.content == b"\0" * 43


@given(PIECES)
def test_a_response_to_head_has_no_body(pieces):
    response, _ = receive(head(200, "Content-Length: 43"), pieces, has_body=False)
    assert (response.status, response.length_bytes) == (200, 43)


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
def test_what_is_no_response(text):
    slot = GuardedBuffers(*LENGTHS)
    with pytest.raises(TierUnavailableError):
        receive(text, slot=slot)
    assert slot.is_guarded()


def test_a_body_in_pieces_without_an_end():
    piece = b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"
    text = head(500, "Transfer-Encoding: chunked") + piece * 5
    response, is_usable = receive(text)
    assert (response.status, response.body, is_usable) == (500, b"", False)


@pytest.mark.parametrize(
    ("piece", "end"),
    [
        (b"1\r\nx\r\n", b"0\r\n\r\n"),
        (b"1;" + b"e" * 1000 + b"\r\nx\r\n", b"0\r\n\r\n"),
        (b"", b"0\r\n" + b"x: y\r\n" * 50_000 + b"\r\n"),
    ],
    ids=["pieces of a byte", "extensions", "trailers"],
)
def test_a_body_in_pieces_is_bounded_as_it_is_sent(piece, end):
    # The body is short, but its chunked encoding is long.
    text = head(503, "Transfer-Encoding: chunked") + piece * 20_000 + end
    response, is_usable = receive(text)
    assert (response.status, response.body, is_usable) == (503, b"", False)


def test_a_body_in_pieces_of_a_byte():
    text = head(503, "Transfer-Encoding: chunked") + b"1\r\nx\r\n" * 5000 + b"0\r\n\r\n"
    response, is_usable = receive(text)
    assert (response.status, response.body, is_usable) == (503, b"x" * 5000, True)


def test_requests():
    assert request_head("GET", "/b/k?x=1", {"host": "h", "a": "b"}) == (
        b"GET /b/k?x=1 HTTP/1.1\r\nhost: h\r\na: b\r\n\r\n"
    )
