import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.loops import loop_factories
from support.redis_server import Server
from support.workbench import Workbench

pytest_asyncio_loop_factories = loop_factories


class RedisBench(Workbench):
    def name(self, key: bytes, prefix: str = "kvtier") -> bytes:
        return f"{prefix}{{}}{self.namespace.fingerprint}:".encode() + key

    def young(self, key: bytes) -> bytes:
        return f"kvtier{{}}{self.namespace.fingerprint}.young:".encode() + key


@pytest.fixture(scope="session")
def rights() -> SimpleNamespace:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    everywhere, cluster, *_ = re.findall(r"`(\+[^`]*)`", text)
    return SimpleNamespace(everywhere=everywhere.split(), cluster=cluster.split())


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
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
