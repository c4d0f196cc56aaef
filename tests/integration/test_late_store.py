"""An engine goes on while its Redis server is down or frozen, and uses the server afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.live import live
from support.redis_server import Server
from support.runners import KEYS, misbehaving

from kvtier_sdk import TierSpec


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


def url(server: Server, runner: str, **options: str) -> str:
    options |= {"runner": runner, "probe_interval": "100ms", "max_probe_interval": "100ms"}
    return f"{server.url}?{'&'.join(f'{name}={value}' for name, value in options.items())}"


def test_tiers_open_side_by_side(tmp_path: Path, runner: str) -> None:
    specs = [
        misbehaving(runner, tmp_path / "diary", name=name, on_open="meet") for name in ("a", "b")
    ]
    with live(specs) as engine:
        assert [tier.is_open for tier in engine.manager.stats[1:]] == [1, 1]


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


def test_what_was_held_back_of_an_outage_comes_before_its_end(
    server: Server, runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If the client logged the outage's end, the held-back lines would come a minute later."""
    server.start()
    spec = TierSpec.from_url(server.url, runner=runner, max_lookup_deadline="50ms")
    with live([spec], slots=64) as engine:
        request = engine.begin("a")
        engine.store(request, KEYS[0])
        server.pause()
        for key in KEYS[10:13]:
            assert engine.settle(request, key) == ["MISS"]
        output = engine.manager.prepare_store(KEYS[1:2], request)
        engine.manager.complete_store(output.keys_to_store, request)
        while not engine.manager.stats[1].is_slow:
            engine.step()
        server.resume()
        while "no longer slow" not in caplog.text:
            engine.step()
        told = [line for line in caplog.messages if "redis lookup" in line or "slow" in line]
    late = "redis lookup: 1 chunk was not done within 50 ms ('lookup_deadline')"
    assert [line.partition(" (2 of this kind")[0] for line in told] == [
        late,
        "redis: slow: no load or store has made progress for 2 s; it gets no stores",
        late,
        "redis: no longer slow",
    ]
    assert caplog.text.count(late) == 2, "and none when it is closed"
