"""An engine starts while its Redis server is down, and uses the server once it is up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import live
from support.redis_server import Server
from support.runners import KEYS

from kvtier_sdk import TierUnavailableError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


def url(server: Server, runner: str, **options: str) -> str:
    options |= {"runner": runner, "probe_interval": "100ms", "max_probe_interval": "100ms"}
    return f"{server.url}?{'&'.join(f'{name}={value}' for name, value in options.items())}"


def test_an_engine_starts_without_its_store_and_uses_it_when_it_is_back(
    server: Server, runner: str
) -> None:
    keys = KEYS[:4]
    with live([url(server, runner)]) as engine:
        host, tier = engine.manager.stats
        assert tier.is_open == 0
        request = engine.begin("early")
        assert engine.settle(request, *keys[:1]) == ["MISS"]
        assert host.misses == {"unavailable": 1}
        engine.store(request, *keys)
        assert tier.dropped["store.unavailable"] == len(keys)
        server.start()
        failures = tier.open_failures
        while not tier.is_open:
            engine.step()
        # Up to two failures can follow: one that is not counted yet, and the attempt under way.
        assert tier.open_failures - failures <= 2
        engine.manager.on_request_finished(request)
        late = engine.begin("late")
        more = KEYS[4:8]
        engine.there_and_back(late, *more)
        assert tier.stored_chunks == len(more)


def test_an_engine_that_needs_its_store_does_not_start(server: Server, runner: str) -> None:
    with (
        pytest.raises(TierUnavailableError, match="Connection refused"),
        live([url(server, runner, required="true")]),
    ):
        raise AssertionError("there is no such engine")


def test_an_engine_ends_while_its_store_is_down(server: Server, runner: str) -> None:
    before = set(threading.enumerate())
    with live([url(server, runner)]) as engine:
        engine.rest()
    left = set(threading.enumerate()) - before
    assert [thread.name for thread in left if thread.name.startswith("kvtier-")] == []
