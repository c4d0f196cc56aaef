"""Redis: the tier, redis-py's plain calls, bare sockets, redis-benchmark."""

from __future__ import annotations

import itertools
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from redis.asyncio import Redis
from support.redis_server import Server, program

from ways.sockets import fill, in_threads, send_all
from ways.tier_way import TierWay
from ways.way import Subject, Way, Work


class RedisPy(Way):
    """redis-py's asyncio ``get`` and ``set``, as many at a time as the tier has connections."""

    name = "redis-py"

    def __init__(self, work: Work, port: int) -> None:
        super().__init__(work)
        self._port = port

    async def open(self) -> None:
        self._client = Redis(port=self._port)

    async def close(self) -> None:
        await self._client.aclose()

    async def store(self) -> None:
        value = self.work.value
        await self.work.each(lambda number: self._client.set(b"py%020d" % number, value(number)))

    async def load(self) -> None:
        await self.work.each(lambda number: self._client.get(b"py%020d" % number))


class BareSockets(Way):
    """The same commands on blocking sockets in threads: the limit of Python."""

    name = "bare sockets"

    def __init__(self, work: Work, port: int) -> None:
        super().__init__(work)
        self._port = port
        self._line = b"$%d\r\n" % work.object_bytes

    async def store(self) -> None:
        self._each(b"*3\r\n$3\r\nSET\r\n", self._store)

    async def load(self) -> None:
        self._each(b"*2\r\n$3\r\nGET\r\n", self._load)

    def _each(
        self, start: bytes, move: Callable[[socket.socket, bytes, list[memoryview]], None]
    ) -> None:
        numbers = iter(range(self.work.chunks))

        def lane(slots: list[list[memoryview]]) -> None:
            with socket.create_connection(("127.0.0.1", self._port)) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for number, buffers in zip(numbers, itertools.cycle(slots), strict=False):
                    move(sock, start + b"$24\r\nbare%020d\r\n" % (number % self.work.keys), buffers)

        in_threads(lane, self.work.lanes())

    def _store(self, sock: socket.socket, head: bytes, buffers: list[memoryview]) -> None:
        send_all(sock, [head + self._line, *buffers, b"\r\n"])
        if sock.recv(100) != b"+OK\r\n":
            raise SystemExit("failed: a value was not set")

    def _load(self, sock: socket.socket, head: bytes, buffers: list[memoryview]) -> None:
        send_all(sock, [head])
        line, end = bytearray(len(self._line)), bytearray(2)
        fill(sock, [memoryview(line), *buffers, memoryview(end)])
        if line != self._line or end != b"\r\n":
            raise SystemExit("failed: not the value that was set")


class RedisBenchmark(Way):
    """redis-benchmark with as many clients: the limit of the server and the loopback."""

    name = "redis-benchmark"

    def __init__(self, work: Work, server: Server) -> None:
        super().__init__(work)
        self._server = server

    async def open(self) -> None:
        # It asks for random keys, and may not have stored all of them.
        for number in range(self.work.keys):
            self._server.ask("SET", f"key:{number:012}", self.work.value(number))

    async def store(self) -> float:
        return self._run("set")

    async def load(self) -> float:
        return self._run("get")

    def _run(self, test: str) -> float:
        work = self.work
        options = ["-p", self._server.port, "-t", test, "-d", work.object_bytes, "-n", work.chunks]
        options += ["-c", work.at_a_time, "-r", work.keys, "--csv"]
        command = [program("redis-benchmark"), *map(str, options)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return work.chunks / float(said.splitlines()[-1].split(",")[1].strip('"'))


class RedisSubject(Subject):
    """A dedicated redis-server on the loopback."""

    name = "redis"
    keys = 16
    limit = RedisBenchmark.name

    def __init__(self, root: Path | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-")
        self._server = Server(Path(self._directory.name))

    def __enter__(self) -> RedisSubject:
        self._server.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.kill()
        self._directory.cleanup()

    def clear(self) -> None:
        self._server.ask("FLUSHALL")

    def ways(self, work: Work) -> Sequence[Way]:
        return [
            TierWay(work, url=f"{self._server.url}?connections={work.at_a_time}"),
            RedisPy(work, self._server.port),
            BareSockets(work, self._server.port),
            RedisBenchmark(work, self._server),
        ]
