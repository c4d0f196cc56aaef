"""The engine's end of the socket to a tier's process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import pytest
import uvloop

from kvtier_sdk.runner.process.channel import Channel
from kvtier_sdk.runner.process.codec import Kind, message


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("unread", [False, True], ids=["closed", "reset"])
def test_what_a_process_wrote_before_its_end_is_read(
    new_loop: Callable[[], asyncio.AbstractEventLoop], unread: bool
) -> None:
    arrived: list[tuple[Kind, bytes]] = []

    async def read_to_the_end() -> None:
        ours, theirs = socket.socketpair()
        link = Channel(ours, asyncio.get_running_loop())
        ended = asyncio.Event()

        def collect() -> None:
            arrived.extend((kind, bytes(body)) for kind, body in link.read())
            if link.at_end:
                ended.set()

        link.attend(collect)
        if unread:
            link.write(message(Kind.JOBS, b"never read"))
        theirs.sendall(message(Kind.LOG, b"last words"))
        theirs.close()
        async with asyncio.timeout(30):
            await ended.wait()
        link.attend(collect)
        link.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(read_to_the_end())
    assert arrived == [(Kind.LOG, b"last words")]
