"""A socket that carries messages."""

from __future__ import annotations

import socket

import pytest

from kvtier_sdk.runner.process.channel import Channel
from kvtier_sdk.runner.process.codec import Kind, MessageError, message


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "reset"])
def test_what_a_process_wrote_before_its_end_is_read(unread: bool) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    if unread:
        channel.write(message(Kind.JOBS, b"never read"))
    theirs.sendall(message(Kind.LOG, b"last words"))
    theirs.close()
    arrived = channel.read()
    assert [(kind, bytes(body)) for kind, body in arrived] == [(Kind.LOG, b"last words")]
    assert channel.read() == []
    assert channel.at_end
    channel.close()


def test_what_the_socket_does_not_accept_is_sent_later_and_in_order() -> None:
    ours, theirs = (Channel(end) for end in socket.socketpair())
    sent = [(Kind.JOBS, bytes([n]) * 100_000) for n in range(20)]
    for kind, body in sent:
        ours.write(message(kind, body))
    assert ours.has_unsent
    arrived = []
    while len(arrived) < len(sent):
        arrived += [(kind, bytes(body)) for kind, body in theirs.read()]
        ours.flush()
    assert arrived == sent
    assert not ours.has_unsent
    ours.close()
    theirs.close()


def test_a_peer_that_reads_nothing_fills_it() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    for _ in range(100):
        channel.write(message(Kind.JOBS, bytes(100_000)))
    assert channel.is_full
    theirs.close()
    channel.flush()
    assert not channel.has_unsent, "for a broken peer it is lost"
    channel.close()


def test_something_else_than_a_message_is_told() -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(bytes(4) + b"\x63")
    with pytest.raises(MessageError):
        channel.read()
    channel.close()
    theirs.close()
