from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from support.peer import Peer, open_peer, settle

from kvtier_sdk import Connection, SystemClock, TierTimeoutError, TierUnavailableError

# A send of this length can stop in the middle, because it exceeds the sockets' buffers.
LONG = bytes(32 * 2**20)


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    with open_peer() as peer:
        yield peer


def rooms(*lengths: int) -> list[memoryview]:
    return [memoryview(bytearray(length)) for length in lengths]


async def cancel_in_the_middle(call: Coroutine[Any, Any, object]) -> None:
    task = asyncio.ensure_future(call)
    await settle()
    assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_buffers_arrive_in_order(peer: Peer) -> None:
    parts = [b"head", memoryview(b"payload" * 1000), b"", b"end"]
    assert not await peer.connection.send(parts)
    whole = b"".join(parts)
    assert await peer.receive(len(whole)) == whole
    assert peer.connection.is_usable


async def test_more_buffers_than_a_call_of_the_system_takes(peer: Peer) -> None:
    assert not await peer.connection.send([b"x"] * 3000)
    assert await peer.receive(3000) == b"x" * 3000
    await peer.send(b"y" * 3000)
    target = rooms(*[1] * 3000)
    await peer.connection.receive(target)
    assert b"".join(target) == b"y" * 3000


async def test_text_and_payload_in_one_piece(peer: Peer) -> None:
    await peer.send(b"first\r\nsecond\r\n" + b"p" * 5000 + b"rest")
    assert await peer.connection.receive_until(b"\r\n", most_bytes=100) == b"first\r\n"
    assert peer.connection.has_unread
    assert not peer.connection.is_usable, "what is left is no reply to the next request"
    assert await peer.connection.receive_until(b"\r\n", most_bytes=100) == b"second\r\n"
    target = rooms(64, 4936)
    await peer.connection.receive(target)
    assert b"".join(target) == b"p" * 5000
    assert await peer.connection.receive_until(b"t", most_bytes=4) == b"rest"
    assert peer.connection.is_usable


async def test_an_end_that_comes_in_two_pieces(peer: Peer) -> None:
    receiving = asyncio.ensure_future(peer.connection.receive_until(b"\r\n", most_bytes=6))
    for piece in (b"line", b"\r", b"\n"):
        await peer.send(piece)
        await settle()
    assert await receiving == b"line\r\n"


async def test_text_without_an_end(peer: Peer) -> None:
    await peer.send(b"x" * 5000)
    with pytest.raises(TierUnavailableError, match="4096 bytes of text came without their end"):
        await peer.connection.receive_until(b"\r\n", most_bytes=4096)
    assert not peer.connection.is_usable


async def test_what_comes_first_is_received_together(peer: Peer) -> None:
    target = rooms(5, 3, 4)
    receiving = asyncio.ensure_future(peer.connection.receive_some(target))
    await settle()
    await peer.send(b"startmi")
    rest = await receiving
    assert [len(room) for room in rest] == [1, 4]
    peer.connection.unread(b"mi")
    await peer.send(b"!end.")
    await peer.connection.receive(target[1:])
    assert b"".join(target) == b"startmi!end."


async def test_a_payload_is_received_in_place(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    read_into: list[int] = []
    readv = os.readv

    def noting_readv(descriptor: int, views: list[memoryview]) -> int:
        read_into.append(len(views[0]))
        return readv(descriptor, views)

    monkeypatch.setattr(os, "readv", noting_readv)
    target = rooms(2**20)
    receiving = asyncio.ensure_future(peer.connection.receive(target))
    await settle()
    await peer.send(b"v" * 2**20)
    await receiving
    assert max(read_into) == 2**20
    assert target[0] == b"v" * 2**20


@pytest.mark.parametrize("sent", [b"", b"part"])
async def test_a_cancelled_receive_closes_and_touches_nothing(peer: Peer, sent: bytes) -> None:
    target = bytearray(1000)
    await peer.send(sent)
    await cancel_in_the_middle(peer.connection.receive([memoryview(target)]))
    target[:] = b"n" * 1000
    assert await peer.receive(1) == b"", "the socket is closed, so nothing more can arrive"
    await settle()
    assert target == b"n" * 1000
    target.clear()  # raises BufferError if a view of it remains
    with pytest.raises(TierUnavailableError, match="connection to peer lost: .* cancelled"):
        await peer.connection.receive(rooms(1))


async def test_a_cancelled_send_closes_and_reads_nothing(peer: Peer) -> None:
    source = bytearray(LONG)
    await cancel_in_the_middle(peer.connection.send([memoryview(source)]))
    source[:] = b"n" * len(source)
    source.clear()  # raises BufferError if a view of it remains
    assert b"n" not in await peer.receive(len(LONG))
    with pytest.raises(TierUnavailableError, match="connection to peer lost: .* cancelled"):
        await peer.connection.send([b"next"])


async def test_two_sends_at_once(peer: Peer) -> None:
    sending = asyncio.ensure_future(peer.connection.send([LONG]))
    await settle()
    assert not peer.connection.is_usable
    for second in (
        peer.connection.send([b"second"]),
        peer.connection.receive(rooms(1)),
        peer.connection.receive_until(b"\n", most_bytes=10),
    ):
        with pytest.raises(RuntimeError, match="another call waits on the connection to peer"):
            await second
    assert await peer.receive(len(LONG)) == LONG
    assert not await sending
    assert not await peer.connection.send([b"third"])
    assert await peer.receive(5) == b"third"


@pytest.mark.parametrize("ending", ["hang_up", "reset"])
@pytest.mark.parametrize("sent", [b"", b"part of a value"])
async def test_an_end_in_the_middle_of_a_value(peer: Peer, ending: str, sent: bytes) -> None:
    receiving = asyncio.ensure_future(peer.connection.receive(rooms(1000)))
    await peer.send(sent)
    await settle()
    getattr(peer, ending)()
    with pytest.raises(TierUnavailableError, match="connection to peer lost") as caught:
        await receiving
    assert caught.value.retryable
    assert not peer.connection.is_usable
    with pytest.raises(TierUnavailableError, match="connection to peer lost"):
        await peer.connection.send([b"next"])


@pytest.mark.parametrize("ending", ["hang_up", "reset"])
async def test_what_came_before_an_end_can_be_received(peer: Peer, ending: str) -> None:
    await peer.send(b"reply\r\n")
    await settle()
    getattr(peer, ending)()
    await settle()
    assert await peer.connection.receive_until(b"\r\n", most_bytes=100) == b"reply\r\n"
    with pytest.raises(TierUnavailableError):
        await peer.connection.receive(rooms(1))


async def test_a_reset_that_comes_together_with_what_was_sent(peer: Peer) -> None:
    receiving = asyncio.ensure_future(peer.connection.receive(rooms(1000)))
    await settle()
    # Without an ``await`` in between, uvloop reports the data and the reset together.
    peer._sock.send(b"part")
    peer.reset()
    with pytest.raises(TierUnavailableError):
        await receiving


@pytest.mark.parametrize("ending", ["hang_up", "reset", "speak"])
async def test_an_idle_peer_that_ends_or_speaks_is_not_usable(peer: Peer, ending: str) -> None:
    assert peer.connection.is_usable
    if ending == "speak":
        await peer.send(b"unasked")
    else:
        getattr(peer, ending)()
    await settle()
    assert not peer.connection.is_usable


async def test_a_server_that_replies_before_it_has_the_whole_request(peer: Peer) -> None:
    sending = asyncio.ensure_future(peer.connection.send([b"head", LONG]))
    await settle()
    await peer.send(b"refused\n")
    rest = await sending
    assert 0 < sum(map(len, rest)) < len(LONG)
    assert await peer.connection.receive_until(b"\n", most_bytes=100) == b"refused\n"
    assert not peer.connection.is_usable, "the next request would begin in the middle of this one"
    sending = asyncio.ensure_future(peer.connection.send(rest))
    assert await peer.receive(4 + len(LONG)) == b"head" + LONG
    assert not await sending
    assert peer.connection.is_usable


async def test_nothing_is_sent_twice_while_the_server_speaks(peer: Peer) -> None:
    piece_bytes, count = 2**16, 512
    sent = b"".join(b"%08d" % number for number in range(piece_bytes * count // 8))

    async def serve() -> bytes:
        received = b""
        for _ in range(count):
            received += await peer.receive(piece_bytes)
            await peer.send(b".")
        return received

    serving = asyncio.ensure_future(serve())
    replies = 0
    rest = await peer.connection.send([memoryview(sent)])
    while replies < count:
        await peer.connection.receive_until(b".", most_bytes=1)
        replies += 1
        if rest and not peer.connection.has_unread:
            rest = await peer.connection.send(rest)
    assert await serving == sent


async def test_a_server_that_refuses_and_hangs_up(peer: Peer) -> None:
    sending = asyncio.ensure_future(peer.connection.send([LONG]))
    await settle()
    await peer.send(b"refused\n")
    peer.reset()
    assert await sending
    assert await peer.connection.receive_until(b"\n", most_bytes=100) == b"refused\n"
    with pytest.raises(TierUnavailableError):
        await peer.connection.receive(rooms(1))


async def test_a_send_to_somebody_who_is_gone_ends(peer: Peer) -> None:
    async def send_all() -> None:
        while await peer.connection.send([LONG]):
            pass

    peer.reset()
    with pytest.raises(TierUnavailableError):
        await send_all()


@pytest.mark.parametrize("operation", ["send", "receive"])
async def test_a_silent_peer(operation: str) -> None:
    with open_peer(stall_timeout_s=0.05) as peer:
        call = {
            "send": lambda: peer.connection.send([LONG]),
            "receive": lambda: peer.connection.receive(rooms(10)),
        }[operation]
        with pytest.raises(TierTimeoutError, match="nothing moved for 0.05 s") as caught:
            await call()
        assert caught.value.retryable
        assert not peer.connection.is_usable


async def test_a_slow_peer_is_not_silent() -> None:
    with open_peer(stall_timeout_s=1.0) as peer:
        target = rooms(15)
        receiving = asyncio.ensure_future(peer.connection.receive(target))
        for _ in range(15):
            await asyncio.sleep(0.1)
            await peer.send(b"x")
        await receiving
        assert target[0] == b"x" * 15


async def test_closing_ends_the_call_under_way(peer: Peer) -> None:
    receiving = asyncio.ensure_future(peer.connection.receive(rooms(1)))
    await settle()
    peer.connection.close("the reason")
    peer.connection.close("another one")
    with pytest.raises(TierUnavailableError, match="connection to peer lost: the reason$"):
        await receiving
    with pytest.raises(TierUnavailableError, match="the reason$"):
        await peer.connection.send([b"x"])
    assert await peer.receive(1) == b""


async def test_connecting_over_tcp_and_a_unix_socket(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(4))
        writer.close()

    path = str(tmp_path / "socket")
    tcp = await asyncio.start_server(serve, "127.0.0.1", 0)
    unix = await asyncio.start_unix_server(serve, path)
    async with tcp, unix:
        port = tcp.sockets[0].getsockname()[1]
        for address in (("localhost", port), path):
            connection = await Connection.connect(address, clock=SystemClock(), timeout_s=10)
            await connection.send([b"echo"])
            assert await connection.receive_until(b"o", most_bytes=4) == b"echo"
            connection.close("the test is over")


async def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    for nowhere in (address, str(tmp_path / "absent")):
        with pytest.raises(TierUnavailableError, match="no connection to .*: [A-Z]"):
            await Connection.connect(nowhere, clock=SystemClock(), timeout_s=10)


async def test_connecting_to_a_server_that_takes_no_more() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with (
            socket.create_connection(address),
            pytest.raises(TierTimeoutError, match="no connection to 127.0.0.1:.* within 0.1"),
        ):
            await Connection.connect(address, clock=SystemClock(), timeout_s=0.1)
