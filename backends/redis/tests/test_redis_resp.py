from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.guarded import GuardedBuffers
from support.peer import converse

from kvtier_redis.resp import Exchange, Kind, Reply, command, run_some, set_command
from kvtier_sdk import TierUnavailableError

LENGTHS = (3, 40)
VALUE = bytes(range(43))
PIECES = st.lists(st.integers(1, 12), max_size=20)


def replies(
    text: bytes, pieces=(), *, slots: int = 0, stores: int = 0, guess_bytes: int = 43
) -> tuple[list, bool]:
    targets = [GuardedBuffers(*LENGTHS) for _ in range(slots)]
    exchanges = [Exchange(b"k", [b"load"], slot.buffers, guess_bytes) for slot in targets]
    exchanges += [Exchange(b"k", [b"store"]) for _ in range(stores)]

    async def talk(connection):
        queue = deque(exchanges)
        await run_some(connection, queue, len(exchanges))
        assert not queue or not connection.is_usable
        return connection.is_usable

    is_usable = converse(talk, text, pieces)
    for slot, exchange in zip(targets, exchanges, strict=False):
        assert slot.is_guarded()
        outcome = exchange.outcome
        if isinstance(outcome, Reply) and outcome.kind is Kind.VALUE and int(outcome.text) <= 43:
            assert slot.content.startswith(VALUE[: int(outcome.text)])
    return [exchange.outcome for exchange in exchanges], is_usable


@given(st.integers(0, 43), st.sampled_from([0, 43, 100]), PIECES)
def test_a_value_lands_in_its_buffers(length, guess_bytes, pieces):
    text = b"$%d\r\n%b\r\n" % (length, VALUE[:length])
    outcomes, _ = replies(text, pieces, slots=1, guess_bytes=guess_bytes)
    assert outcomes == [Reply(Kind.VALUE, str(length))]


LINES = {
    b"-ERR no \xff\r\n": Reply(Kind.ERROR, "ERR no \ufffd"),
    b"-" + b"x" * 4000 + b"\r\n": Reply(Kind.ERROR, "x" * 4000),
}


@given(st.sampled_from([*LINES.items(), (b"$-1\r\n", Reply(Kind.ABSENT, "-1"))]), PIECES)
def test_a_line_in_the_place_of_a_value(line, pieces):
    text, expected = line
    outcomes, _ = replies(text, pieces, slots=1)
    assert outcomes == [expected]


@given(st.lists(st.sampled_from([(b"+OK\r\n", Reply(Kind.OK, "OK")), *LINES.items()])), PIECES)
def test_lines_come_one_behind_the_other(lines, pieces):
    outcomes, _ = replies(b"".join(text for text, _ in lines), pieces, stores=len(lines))
    assert outcomes == [reply for _, reply in lines]


@given(st.integers(44, 10**12), PIECES)
def test_a_value_that_is_too_long_ends_the_connection(length, pieces):
    outcomes, is_usable = replies(b"$%d\r\n%b" % (length, VALUE * 3), pieces, slots=1)
    assert outcomes == [Reply(Kind.VALUE, str(length))]
    # The connection must close. Otherwise the rest of the value would be read as the next reply.
    assert not is_usable


@pytest.mark.parametrize(
    "text",
    [
        b"*1\r\n$1\r\nx\r\n",
        b"\r\n",
        b"\0" * 100,
        b"$\r\n",
        b"$-2\r\n",
        b"$4x\r\n",
        b"$+43\r\n",
        b"$43\r\n" + VALUE + b"xx",
        b"$43\r\n" + VALUE + b"\n\r",
        b"$43\r\n" + VALUE[:-1],
        b"$40\r\n" + VALUE + b"\r\n",
        b"$9\r\n" + VALUE + b"\r\n",
        b"$40\r\n" + VALUE[:40] + b"\r\n+OK\r\n",
        b":17\r\n",
        b"+QUEUED\r\n",
        b"+OK\r\n",
        b"+" + b"x" * 5000,
        b"-" + b"x" * 5000,
        b"$" + b"9" * 5000,
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
def test_what_is_no_reply_to_a_load(text):
    (outcome,), is_usable = replies(text, slots=1)
    assert type(outcome) is TierUnavailableError
    assert not is_usable


@pytest.mark.parametrize(
    "text", [b"$-1\r\n", b"$3\r\nfoo", b":0\r\n", b"+QUEUED\r\n", b"+PONG\r\n"]
)
def test_what_is_no_reply_to_a_store(text):
    (outcome,), is_usable = replies(text, stores=1)
    assert type(outcome) is TierUnavailableError
    assert not is_usable


def test_a_reply_too_many_ends_the_connection():
    outcomes, is_usable = replies(b"+OK\r\n+OK\r\n", stores=1)
    assert outcomes == [Reply(Kind.OK, "OK")]
    assert not is_usable


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
