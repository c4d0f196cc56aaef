"""Real servers on free ports of the loopback, and a tier with transfers to put into them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import uvloop
from support.redis_server import Server

from kvtier_redis import RedisTier
from kvtier_sdk import (
    Namespace,
    RequestContext,
    SystemClock,
    TierContext,
    TierError,
    TierSpec,
    Transfer,
)

HEADER_BYTES = 64
_PIECE_BYTES = 16 * 1024


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test runs on both loops: they receive, send and tear down in ways of their own."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Proxy:
    """Passes bytes on to a server of the loopback, in both directions, while it is told to.

    Args:
        port: the server's.
    """

    def __init__(self, port: int) -> None:
        self._to_port = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._listener: asyncio.Server | None = None
        self._open = asyncio.Event()
        self._open.set()
        self.connections = 0
        #: Bytes that may still pass to the client and to the server; ``None`` for any number.
        self.left_bytes: dict[str, int | None] = {"client": None, "server": None}
        #: What happens then: "hold" until :meth:`release`, or "cut" both connections.
        self.then = "hold"
        self.spent = asyncio.Event()

    async def start(self) -> str:
        """Listen; returns the URL to connect to."""
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._listener.sockets[0].getsockname()[1]
        return f"redis://127.0.0.1:{port}"

    def release(self) -> None:
        """Let everything pass from now on."""
        self.left_bytes = {"client": None, "server": None}
        self._open.set()

    def limit(self, side: str, count_bytes: int, then: str) -> None:
        """Let so many bytes pass to one side, then hold or cut."""
        self.left_bytes[side] = count_bytes
        self.then = then
        self.spent.clear()
        self._open.clear()

    async def close(self) -> None:
        self._open.set()
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
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
        with contextlib.suppress(OSError):
            while piece := await source.read(_PIECE_BYTES):
                left_bytes = self.left_bytes[side]
                if left_bytes is not None:
                    sink.write(piece[:left_bytes])
                    piece = piece[left_bytes:]
                    self.left_bytes[side] = left_bytes - min(left_bytes, _PIECE_BYTES)
                    if piece:
                        self.spent.set()
                        if self.then == "cut":
                            break
                        await self._open.wait()
                sink.write(piece)
                await sink.drain()
        for writer in pair:
            writer.close()


class Workbench:
    """Opens tiers and makes what is stored in them."""

    request = RequestContext("r1")

    def __init__(self, chunk_bytes: int = 100_000) -> None:
        self.chunk_bytes = chunk_bytes
        self.facts: dict[str, object] = {"model": "m", "dtype": "bf16"}
        self.removed: list[bytes] = []
        self.opened: list[RedisTier] = []

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.facts)

    @property
    def object_bytes(self) -> int:
        return HEADER_BYTES + self.chunk_bytes

    def make(self, url: str, **options: object) -> RedisTier:
        context = TierContext(
            name="redis",
            namespace=self.namespace,
            chunk_bytes=self.chunk_bytes,
            header_bytes=HEADER_BYTES,
            payload_bytes=self.chunk_bytes,
            clock=SystemClock(),
            logger=logging.getLogger("kvtier.tier.redis"),
            report_removed=self.removed.extend,
        )
        return RedisTier(TierSpec.from_url(url, **options).config, context)

    async def open(self, url: str, **options: object) -> RedisTier:
        tier = self.make(url, **options)
        self.opened.append(tier)
        await tier.open()
        return tier

    async def close(self) -> None:
        while self.opened:
            await self.opened.pop().close()

    def name(self, key: bytes, prefix: str = "kvtier") -> bytes:
        return f"{prefix}{{}}{self.namespace.fingerprint}:".encode() + key

    def empty(self, key: bytes) -> Transfer:
        header, payload = bytearray(HEADER_BYTES), bytearray(self.chunk_bytes)
        return Transfer(key, self.request, memoryview(header), memoryview(payload))

    def content(self, key: bytes, seed: int = 0) -> bytes:
        pattern = key + bytes([seed]) + bytes(range(251)) + b"\r\n"
        return (pattern * (self.object_bytes // len(pattern) + 1))[: self.object_bytes]

    def full(self, key: bytes, seed: int = 0) -> Transfer:
        transfer = self.empty(key)
        text = self.content(key, seed)
        transfer.header[:], transfer.payload[:] = text[:HEADER_BYTES], text[HEADER_BYTES:]
        return transfer

    def holds(self, transfer: Transfer, seed: int = 0) -> bool:
        return b"".join(transfer.buffers) == self.content(transfer.key, seed)

    async def put(self, tier: RedisTier, *keys: bytes) -> Sequence[TierError | None]:
        return await tier.store([self.full(key) for key in keys])

    async def has(self, tier: RedisTier, *keys: bytes) -> list[bool]:
        return list(await tier.lookup(keys, self.request))

    async def loads(self, tier: RedisTier, *keys: bytes) -> bool:
        batch = [self.empty(key) for key in keys]
        verdicts = await tier.load(batch)
        return verdicts == [None] * len(keys) and all(map(self.holds, batch))


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers; they end with the test."""
    made: list[Server] = []

    def make(*options: str, sentinel: str | None = None) -> Server:
        server = Server(tmp_path / f"server-{len(made)}", *options, sentinel=sentinel)
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()


@pytest.fixture
def server(make_server: Callable[..., Server]) -> Server:
    return make_server("--save", "").start()


@pytest.fixture
async def bench() -> AsyncIterator[Workbench]:
    bench = Workbench()
    yield bench
    await bench.close()


@pytest.fixture
def make_proxy() -> Callable[[int], Proxy]:
    """:class:`Proxy`, for tests that cannot import it."""
    return Proxy
