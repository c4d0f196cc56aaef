"""A network link to a server of the loopback, which can be slow or cut what it carries."""

from __future__ import annotations

import asyncio
import contextlib
import threading

_PIECE_BYTES = 16 * 1024


class Link:
    """Carries connections to a server's port, on a loop in a thread of its own.

    Attributes:
        port: where it listens.
        most_bytes: what a connection may carry to the client before it is cut; ``None`` for any.
        bytes_per_s: what it carries in both directions together; ``None`` for any.
    """

    def __init__(self, to_port: int) -> None:
        self.most_bytes: int | None = None
        self.bytes_per_s: float | None = None
        self._to_port = to_port
        self._next_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._listener = self._loop.run_until_complete(
            asyncio.start_server(self._serve, "127.0.0.1", 0)
        )
        self.port: int = self._listener.sockets[0].getsockname()[1]
        self._thread = threading.Thread(target=self._loop.run_forever, name="link")
        self._thread.start()

    def close(self) -> None:
        """Cut all connections, and end the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._listener.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._to_port)
            try:
                await asyncio.gather(
                    self._carry(reader, there),
                    self._carry(there_reader, writer, to_client=True),
                )
            finally:
                there.transport.abort()
        writer.transport.abort()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, to_client: bool = False
    ) -> None:
        carried_bytes = 0
        while piece := await source.read(_PIECE_BYTES):
            carried_bytes += len(piece)
            most_bytes = self.most_bytes if to_client else None
            if most_bytes is not None and carried_bytes > most_bytes:
                sink.write(piece[: most_bytes - carried_bytes])
                with contextlib.suppress(OSError):
                    await sink.drain()
                raise ConnectionAbortedError
            await self._wait_for_turn(len(piece))
            sink.write(piece)
            await sink.drain()
        # Both directions end together; no protocol here uses a half-closed connection.
        raise ConnectionAbortedError

    async def _wait_for_turn(self, count_bytes: int) -> None:
        if self.bytes_per_s is None:
            return
        now_s = self._loop.time()
        self._next_s = max(now_s, self._next_s) + count_bytes / self.bytes_per_s
        await asyncio.sleep(self._next_s - now_s)
