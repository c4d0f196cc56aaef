from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from kvtier_sdk import Connection, SystemClock

T = TypeVar("T")

# With this socket option, closing resets the connection.
_NO_LINGER = struct.pack("ii", 1, 0)


class Peer:
    """A server's end of a TCP connection; ``connection`` is the client's end."""

    def __init__(self, stall_timeout_s: float | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            sock = socket.create_connection(listener.getsockname())
            self._sock, _ = listener.accept()
        for end in (sock, self._sock):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = Connection(sock, "peer", SystemClock(), stall_timeout_s=stall_timeout_s)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def receive(self, count_bytes: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < count_bytes:
            piece = await loop.sock_recv(self._sock, min(2**18, count_bytes - len(data)))
            if not piece:
                break
            data += piece
        return data

    def hang_up(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._sock.close()

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def open_peer(stall_timeout_s: float | None = None) -> Iterator[Peer]:
    peer = Peer(stall_timeout_s)
    try:
        yield peer
    finally:
        peer.connection.close("the test is over")
        peer.close()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0.001)


def converse(
    talk: Callable[[Connection], Awaitable[T]], text: bytes, pieces: Iterable[int] = ()
) -> T:
    """Return the result of ``talk``. The server sends ``text`` in ``pieces`` and then hangs up."""

    async def run() -> T:
        with open_peer() as peer:
            client = asyncio.ensure_future(talk(peer.connection))
            left = text
            with contextlib.suppress(OSError):
                for count_bytes in pieces:
                    await peer.send(left[:count_bytes])
                    left = left[count_bytes:]
                    await asyncio.sleep(0)
                await peer.send(left)
                peer.hang_up()
            return await client

    return asyncio.run(run())
