"""A proxy between a client and a server, which can slow, hold or cut their traffic."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

_PIECE_BYTES = 16 * 1024
# With this socket option, closing resets the connection.
_NO_LINGER = struct.pack("ii", 1, 0)


class Proxy:
    def __init__(self, port: int, scheme: str) -> None:
        self._to_port = port
        self._scheme = scheme
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self.connections = 0
        #: Bytes that can still pass to the client and to the server; ``None`` means no limit.
        self.left_bytes: dict[str, int | None] = {"client": None, "server": None}
        #: The action at the limit: "hold" the bytes until :meth:`release`, or "cut" or "reset" the
        #: connections to the client and to the server.
        self.then = "hold"
        self.spent = asyncio.Event()
        #: Bytes that each connection passes to its client before a cut; ``None`` means no limit.
        self.each_bytes: int | None = None
        #: Speed of all connections together, in both directions; ``None`` means no limit.
        self.bytes_per_s: float | None = None
        self._next_s = 0.0

    async def start(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        return f"{self._scheme}://127.0.0.1:{port}"

    def release(self) -> None:
        self.left_bytes = {"client": None, "server": None}
        self._open.set()

    def limit(self, side: str, count_bytes: int, then: str) -> None:
        self.left_bytes[side] = count_bytes
        self.then = then
        self.spent.clear()
        self._open.clear()

    async def close(self) -> None:
        self._open.set()
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            if not writer.transport.is_closing():
                writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            there = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        pair = [writer, there[1]]
        self._writers += pair
        for side, source, sink in (("server", reader, there[1]), ("client", there[0], writer)):
            task = asyncio.create_task(self._pump(side, source, sink, pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        side: str,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        pair: list[asyncio.StreamWriter],
    ) -> None:
        carried_bytes = 0
        with contextlib.suppress(OSError):
            while piece := await source.read(_PIECE_BYTES):
                carried_bytes += len(piece)
                each_bytes = self.each_bytes if side == "client" else None
                if each_bytes is not None and carried_bytes > each_bytes:
                    sink.write(piece[: each_bytes - carried_bytes])
                    break
                await self._wait_for_turn(len(piece))
                left_bytes = self.left_bytes[side]
                if left_bytes is not None:
                    sink.write(piece[:left_bytes])
                    piece = piece[left_bytes:]
                    self.left_bytes[side] = left_bytes - min(left_bytes, _PIECE_BYTES)
                    if piece:
                        self.spent.set()
                        if self.then == "reset":
                            for writer in pair:
                                _reset(writer)
                            return
                        if self.then == "cut":
                            break
                        await self._open.wait()
                sink.write(piece)
                await sink.drain()
        for writer in pair:
            writer.close()

    async def _wait_for_turn(self, count_bytes: int) -> None:
        if self.bytes_per_s is not None:
            now_s = asyncio.get_running_loop().time()
            self._next_s = max(now_s, self._next_s) + count_bytes / self.bytes_per_s
            await asyncio.sleep(self._next_s - now_s)


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()
