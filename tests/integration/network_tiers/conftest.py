"""Fixtures for each network tier: a real server, and a proxy in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.loops import loop_factories
from support.proxy import Proxy
from support.redis_server import Server
from support.s3_server import S3Server
from support.workbench import Workbench

from kvtier_sdk import SecondaryTierManager

pytest_asyncio_loop_factories = loop_factories


@pytest.fixture(autouse=True)
async def bounded() -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    timer = loop.call_later(60.0, lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
    yield
    timer.cancel()


@dataclass
class Network:
    proxy: Proxy
    url: Callable[[str], str]
    bench: Workbench = field(default_factory=Workbench)

    async def open(self, **options: object) -> SecondaryTierManager:
        url = self.url(await self.proxy.start())
        return await self.bench.open(url, **{"connections": 1, **options})


@pytest.fixture(scope="module", params=["redis", "s3"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server | S3Server]:
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "redis":
        redis = Server(directory, "--save", "").start()
        yield redis
        redis.kill()
    else:
        with S3Server(directory) as s3:
            s3.make_shards(f"kv/chunks/{Workbench().namespace.fingerprint}")
            yield s3


@pytest.fixture
async def network(server: Server | S3Server) -> AsyncIterator[Network]:
    if isinstance(server, S3Server):
        network = Network(
            Proxy(server.port, "http"), lambda endpoint: server.tier_url(endpoint=endpoint)
        )
    else:
        network = Network(Proxy(server.port, "redis"), lambda url: url)
    yield network
    await network.bench.close()
    await network.proxy.close()
