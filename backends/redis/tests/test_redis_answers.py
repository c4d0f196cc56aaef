"""The protocol, whatever the pieces it comes in, and whatever else may come."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_redis.answers import (
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    command,
    set_command,
)

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


def expecting(*target) -> AnswerReader:
    reader = AnswerReader()
    reader.expect(target)
    return reader


def feed(reader: AnswerReader, text: bytes, pieces: list[int]) -> tuple[list[Answer], bytes]:
    """Put text into the reader, at most so much at a time, up to the first answers.

    Returns:
        The answers, and what was not taken.
    """
    sizes = iter(pieces)
    answers: list[Answer] = []
    while text and not answers:
        rooms = list(reader.rooms)
        assert all(map(len, rooms))
        count = left = min(sum(map(len, rooms)), len(text), next(sizes, len(text)))
        assert count > 0
        for room in rooms:
            piece, text = text[: min(left, len(room))], text[min(left, len(room)) :]
            room[: len(piece)] = piece
            left -= len(piece)
        answers = reader.took(count)
    return answers, text


PIECES = st.lists(st.integers(1, 12), max_size=60)


@given(PIECES)
def test_a_value_lands_in_its_buffers(pieces):
    slot = Slot()
    answer = feed(expecting(*slot.buffers), b"$43\r\n" + VALUE + b"\r\n", pieces)
    assert answer == ([Answer(Kind.FILLED)], b"")
    assert slot.value == VALUE
    assert slot.is_guarded()


@given(
    st.sampled_from(
        [
            (b"+OK\r\n", Answer(Kind.OK, "OK")),
            (b"$-1\r\n", Answer(Kind.ABSENT, "-1")),
            (b"-ERR no \xff\r\n", Answer(Kind.ERROR, "ERR no \ufffd")),
            (b"-" + b"x" * 4000 + b"\r\n", Answer(Kind.ERROR, "x" * 4000)),
        ]
    ),
    st.booleans(),
    PIECES,
)
def test_a_line_is_an_answer(line, is_load, pieces):
    text, expected = line
    slot = Slot()
    reader = expecting(*slot.buffers if is_load else ())
    assert feed(reader, text, pieces) == ([expected], b"")
    assert slot.is_guarded()
    # The next one is read as if it were the first.
    reader.expect(slot.buffers)
    assert feed(reader, b"$43\r\n" + VALUE + b"\r\n", pieces) == ([Answer(Kind.FILLED)], b"")
    assert slot.value == VALUE


@given(st.integers(0, 10**12).filter(lambda length: length != 43), PIECES)
def test_another_length_is_never_taken_for_the_value(length, pieces):
    slot = Slot()
    answers, _ = feed(expecting(*slot.buffers), b"$%d\r\n%b" % (length, VALUE * 3), pieces)
    assert answers == [Answer(Kind.OTHER_LENGTH, str(length))]
    assert slot.is_guarded()


@given(st.binary(max_size=60) | st.sampled_from([b"$43\r\n", b"$043\r\n"]), st.binary(), PIECES)
def test_whatever_comes_nothing_is_overrun(head, rest, pieces):
    slot = Slot()
    with contextlib.suppress(ProtocolError):
        feed(expecting(*slot.buffers), head + rest, pieces)
    assert slot.is_guarded()


@pytest.mark.parametrize(
    "text",
    [
        b"*1\r\n$1\r\nx\r\n",
        b"\r\n",
        b"\0",
        b"$\r\n",
        b"$-2\r\n",
        b"$4x\r\n",
        b"$+43\r\n",
        b"$43\r\n" + VALUE + b"xx",
        b"$43\r\n" + VALUE + b"\n\r",
        b":17\r\n",
        b"+QUEUED\r\n",
        b"+" + b"x" * 5000,
        b"-" + b"x" * 5000,
        b"$" + b"9" * 30,
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_what_is_no_answer(text):
    slot = Slot()
    reader = expecting(*slot.buffers)
    with pytest.raises(ProtocolError):
        feed(reader, text, [])
    assert slot.is_guarded()


LINES = {
    b"+OK\r\n": Answer(Kind.OK, "OK"),
    b"$-1\r\n": Answer(Kind.ABSENT, "-1"),
    b"-MOVED 7 somewhere:6379\r\n": Answer(Kind.ERROR, "MOVED 7 somewhere:6379"),
}


@given(st.lists(st.sampled_from(list(LINES))), PIECES)
def test_lines_come_one_behind_the_other(lines, pieces):
    reader = expecting()
    answers, text = [], b"".join(lines)
    while text:
        more, text = feed(reader, text, pieces)
        answers += more
    assert answers == [LINES[line] for line in lines]


def test_commands():
    assert command(b"GET", b"a\r\n") == b"*2\r\n$3\r\nGET\r\n$3\r\na\r\n\r\n"
    buffers = memoryview(b"head"), memoryview(b"payload")
    parts = set_command(b"k", buffers, None)
    assert b"".join(parts) == b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$11\r\nheadpayload\r\n"
    assert parts[1] is buffers[0]
    assert parts[2] is buffers[1]
    with_ttl = b"".join(set_command(b"k", buffers, 1500))
    assert with_ttl.startswith(b"*5\r\n")
    assert with_ttl.endswith(b"headpayload\r\n$2\r\nPX\r\n$4\r\n1500\r\n")
