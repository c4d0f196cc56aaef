"""One side of a conversation over a socket pair, while the other side sends a text and hangs up."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from functools import cache
from typing import TypeVar

from kvtier_sdk import Connection, SystemClock

T = TypeVar("T")


class Slot:
    """Two buffers between guards, which must stay untouched."""

    LENGTHS = (3, 40)

    def __init__(self) -> None:
        self._memory = bytearray(b"g" * 10 + b"\0" * sum(self.LENGTHS) + b"g" * 10)
        view = memoryview(self._memory)[10:-10]
        self.buffers = (view[: self.LENGTHS[0]], view[self.LENGTHS[0] :])

    @property
    def value(self) -> bytes:
        return bytes(self._memory[10:-10])

    def is_guarded(self) -> bool:
        return self._memory[:10] == self._memory[-10:] == b"g" * 10


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def converse(talk: Callable[[Connection], Awaitable[T]], text: bytes, piece_bytes: int) -> T:
    """Run one side of a conversation.

    Args:
        talk: what the client does.
        text: what the server sends, whatever the client does.
        piece_bytes: the length of its pieces; 0 for one piece.

    Returns:
        The result of ``talk``.
    """

    async def run() -> T:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        connection = Connection(ours, "server", SystemClock(), stall_timeout_s=5.0)
        sender = asyncio.ensure_future(send(theirs))
        try:
            return await talk(connection)
        finally:
            # A client that has read enough leaves the rest in a socket that may be full.
            sender.cancel()
            await asyncio.wait([sender])
            connection.close("the conversation is over")
            theirs.close()

    async def send(theirs: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for at in range(0, len(text), piece_bytes or len(text) or 1):
                piece = text[at : at + piece_bytes] if piece_bytes else text
                await asyncio.get_running_loop().sock_sendall(theirs, piece)
                await asyncio.sleep(0)
            theirs.shutdown(socket.SHUT_WR)

    return _loop().run_until_complete(run())
