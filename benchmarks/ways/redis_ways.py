"""The programs for Redis: the tier, plain calls of redis-py, and redis-benchmark."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from redis.asyncio import Redis
from support.redis_server import Server, program

from ways.tier_way import TierWay
from ways.way import ClientWay, Subject, Way, Work


class RedisPy(ClientWay):
    """redis-py's asyncio ``get`` and ``set``, with as many connections as the tier."""

    def __init__(self, work: Work, port: int) -> None:
        super().__init__(work)
        self._port = port

    async def open(self) -> None:
        self._client = Redis(port=self._port)

    async def close(self) -> None:
        await self._client.aclose()

    async def put(self, number: int, value: bytes) -> None:
        await self._client.set(b"py%020d" % number, value)

    async def get(self, number: int) -> bytes:
        value: bytes = await self._client.get(b"py%020d" % number)
        return value


class RedisBenchmark(Way):
    """redis-benchmark with ``at_a_time`` clients: the limit of the server and the loopback.

    redis-benchmark moves its own bytes, so the loaded bytes cannot be compared.
    """

    def __init__(self, work: Work, server: Server) -> None:
        super().__init__(work)
        self._server = server

    async def open(self) -> None:
        # Set all keys first, because redis-benchmark reads random keys and no read may miss.
        for number, value in enumerate(self.work.values):
            self._server.ask("SET", f"key:{number:012}", value)

    async def store(self) -> float:
        return self._run("set")

    async def load(self) -> float:
        return self._run("get")

    async def check(self) -> None:
        return

    def _run(self, test: str) -> float:
        work = self.work
        options = ["-p", self._server.port, "-t", test, "-d", work.object_bytes, "-n", work.chunks]
        options += ["-c", work.at_a_time, "-r", work.keys, "--csv"]
        command = [program("redis-benchmark"), *map(str, options)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return work.chunks / float(said.splitlines()[-1].split(",")[1].strip('"'))


class RedisSubject(Subject):
    keys_bytes = 32 * 2**20

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        options = "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"
        self._server = Server(self.directory, *options).start()
        self.opened.callback(self._server.kill)
        self.url = self._server.url

    def clear(self) -> None:
        self._server.ask("FLUSHALL")

    def ways(self, work: Work) -> Mapping[str, Callable[[int], Way]]:
        url, port = f"{self.url}?connections={work.at_a_time}", self._server.port
        return {
            "kvtier": lambda number: TierWay(work, url=url),
            "redis-py": lambda number: RedisPy(work, port),
            "redis-benchmark": lambda number: RedisBenchmark(work, self._server),
        }
