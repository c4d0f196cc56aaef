"""Redis: the tier, redis-py's plain calls, redis-benchmark."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from redis.asyncio import Redis
from support.redis_server import Server, program

from ways.tier_way import TierWay
from ways.way import Subject, Way, Work


class RedisPy(Way):
    """asyncio ``get`` and ``set``, as many at a time as the tier has connections."""

    name = "redis-py"

    def __init__(self, work: Work, port: int) -> None:
        super().__init__(work)
        self._value = os.urandom(work.object_bytes)
        self._port = port

    async def open(self) -> None:
        self._client = Redis(port=self._port)

    async def close(self) -> None:
        await self._client.aclose()

    async def store(self) -> None:
        await self.work.each(lambda number: self._client.set(b"py%020d" % number, self._value))

    async def load(self) -> None:
        await self.work.each(lambda number: self._client.get(b"py%020d" % number))


class RedisBenchmark(Way):
    """redis-benchmark with as many clients: the limit of the server and the loopback."""

    name = "redis-benchmark"

    def __init__(self, work: Work, server: Server) -> None:
        super().__init__(work)
        self._server = server

    async def open(self) -> None:
        # It asks for keys at random, of which it may not have stored all.
        for number in range(self.work.keys):
            self._server.ask("SET", f"key:{number:012}", bytes(self.work.object_bytes))

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
    """A redis-server of its own on the loopback."""

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
            RedisBenchmark(work, self._server),
        ]
