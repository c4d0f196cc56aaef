"""Real servers on free ports of the loopback, and a tier with transfers to put into them."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
import uvloop
from support.proxy import Proxy
from support.workbench import Workbench

_START_S = 20.0


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Each test runs on both loops: they receive, send and tear down in ways of their own."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    # A cluster's nodes talk on another port, 10,000 further on.
    return port if port < 55_000 else free_port()


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is missing; 'make redis-server' or 'apt-get install redis-server'")
    return found


class Server:
    """A redis-server process of its own, in a directory of its own."""

    def __init__(self, directory: Path, *options: str, sentinel: str | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.port = free_port()
        self.options = ["--port", str(self.port), "--bind", "127.0.0.1", *options]
        self.sentinel = sentinel
        self.client_options: dict[str, object] = {"port": self.port}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, ready: Callable[[], object] | None = None) -> Server:
        """Start it, and wait until it answers, or until ``ready``."""
        arguments = ["--dir", str(self.directory), "--save", "", *self.options]
        if self.sentinel is not None:
            (self.directory / "sentinel.conf").write_text(f"port {self.port}\n{self.sentinel}\n")
            arguments = [str(self.directory / "sentinel.conf"), "--sentinel"]
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [program("redis-server"), *arguments], stdout=log, stderr=log
            )
        self.wait_until(ready or (lambda: self.ask("PING")), "it answers")
        return self

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        end_s = time.monotonic() + _START_S
        while True:
            try:
                if condition():
                    return
            except redis.RedisError:
                pass
            if (
                time.monotonic() > end_s
                or self._process is None
                or self._process.poll() is not None
            ):
                log = (self.directory / "log").read_text()
                pytest.fail(f"redis-server: waited in vain until {what}\n{log}")
            time.sleep(0.02)

    def is_loading(self) -> bool:
        return bool(self.ask("INFO", "persistence")["loading"])  # type: ignore[index]

    def ask(self, *words: object) -> object:
        with redis.Redis(**self.client_options, socket_timeout=5) as client:  # type: ignore[arg-type]
            return client.execute_command(*words)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


class RedisBench(Workbench):
    """Knows what a chunk is called in the server."""

    def name(self, key: bytes, prefix: str = "kvtier") -> bytes:
        return f"{prefix}{{}}{self.namespace.fingerprint}:".encode() + key


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
async def bench() -> AsyncIterator[RedisBench]:
    bench = RedisBench()
    yield bench
    await bench.close()


@pytest.fixture
def make_proxy() -> Callable[[int], Proxy]:
    """Makes a :class:`Proxy` to a server's port."""
    return lambda port: Proxy(port, "redis")
