"""``kvtier tier explain`` asks the running engine why a chunk of a prompt is absent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier, tier
from support.live import CHUNK_BYTES, Live, live
from support.redis_server import Server
from support.runners import KEYS

from kvtier_sdk import Namespace, OffloadKey
from kvtier_sdk.cli.engine import ask
from kvtier_sdk.engine import ResetScope

NAMESPACE = Namespace({"model": "m"}).for_chunks(CHUNK_BYTES)
#: The length of a chunk's file: the payload, and a header that direct I/O pads.
OBJECT_BYTES = 2 * CHUNK_BYTES


class Site:
    """A running engine, and a configuration that names its socket for the commands."""

    def __init__(self, engine: Live, config: Path, socket: Path) -> None:
        self.engine = engine
        self.config = config
        self.socket = socket
        self.request = engine.begin("r")

    def words(self, *keys: OffloadKey) -> list[str]:
        named = (f"--key={key.hex()}" for key in keys)
        facts = self.config.with_name("facts.json")
        facts.write_text(NAMESPACE.manifest_json())
        return ["tier", "explain", str(self.config), "--namespace", str(facts), *named]

    def reasons(self, *keys: OffloadKey) -> list[str | None]:
        (found,) = tier(*self.words(*keys)[1:])["tiers"]
        return [found["losses"].get(key.hex(), [None])[0] for key in keys]


@contextmanager
def site(tmp_path: Path, url: str, **options: Any) -> Iterator[Site]:
    config, socket = tmp_path / "kv.toml", tmp_path / "engine.sock"
    config.write_text(f'slots = 8\nadmin_socket = "{socket}"\n[[tiers]]\nurl = "{url}"\n')
    with live([url], admin_socket=str(socket), **options) as engine:
        yield Site(engine, config, socket)


def files(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("kv/*/*/*.kv"))


@pytest.fixture
def url(runner: str, tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?runner={runner}&min_free=0"


def test_evicted_and_never_stored(tmp_path: Path, url: str) -> None:
    with site(tmp_path, f"{url}&capacity={4 * OBJECT_BYTES}&admission=off") as found:
        for key in KEYS[:12]:
            found.engine.store(found.request, key)
        assert found.reasons(KEYS[0], KEYS[11], KEYS[60]) == ["evicted", None, "no_record_since"]
        lines = kvtier(*found.words(KEYS[0], KEYS[11], KEYS[60])).stdout.splitlines()
        shown = [
            re.sub(r"\d\d-\d\d \d\d:\d\d$", "WHEN", line.split("  ")[1]) for line in lines[-3:]
        ]
        assert shown == ["evicted WHEN", "present", "no_record_since WHEN"]
    ended = kvtier(*found.words(KEYS[0]))
    assert (ended.returncode, ended.stdout.splitlines()[-1].split()[1]) == (0, "absent")
    assert f"no engine answers at {found.socket}" in ended.stderr


def test_expired(tmp_path: Path, url: str) -> None:
    with site(tmp_path, f"{url}&max_age=1h") as found:
        found.engine.store(found.request, *KEYS[:2])
        long_ago_s = files(tmp_path)[0].stat().st_mtime - 7200
        for file in files(tmp_path):
            os.utime(file, (long_ago_s, long_ago_s))
        found.engine.manager.reset_cache()
        assert found.engine.settle(found.engine.begin("again"), *KEYS[:2]) == ["MISS"] * 2
        assert found.reasons(*KEYS[:2]) == ["expired"] * 2


def test_purged_by_the_engine_and_removed_by_an_operator(tmp_path: Path, url: str) -> None:
    with site(tmp_path, url) as found:
        found.engine.store(found.request, *KEYS[:2])
        found.engine.manager.reset_cache(ResetScope.ALL)
        found.engine.rest()
        assert found.reasons(*KEYS[:2]) == ["purged", "purged"]
        found.engine.store(found.request, *KEYS[2:4])
        tier("rm", str(found.config), "--all", "--yes")
        found.engine.store(found.request, KEYS[4])
        assert found.reasons(*KEYS[2:5]) == ["removed", "removed", None]


def test_refused_and_damaged(tmp_path: Path, url: str) -> None:
    with site(tmp_path, url) as found:
        found.engine.store(found.request, KEYS[0])
        (file,) = files(tmp_path)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        found.engine.manager.reset_cache()
        assert found.engine.settle(found.engine.begin("again"), KEYS[0]) == ["MISS"]
        ask(found.socket, {"command": "drain", "tier": "file"})
        found.engine.store(found.request, KEYS[1])
        assert found.reasons(*KEYS[:2]) == ["load.corrupt", "store.drained"]


def test_a_full_host_pool(tmp_path: Path, url: str) -> None:
    with site(tmp_path, url, slots=8) as found:
        found.engine.manager.prepare_store(KEYS[:8], found.request)
        found.engine.store(found.engine.begin("too much"), KEYS[8])
        assert found.reasons(KEYS[8]) == ["store.primary_full"]


def test_not_admitted(tmp_path: Path, url: str) -> None:
    with site(tmp_path, f"{url}&capacity={8 * OBJECT_BYTES}", slots=8) as found:
        stats = found.engine.manager.stats[1]
        for number in range(400):
            found.engine.store(found.request, *KEYS[:4])
            new = [b"new" + bytes([number // 256, number % 256, at]) for at in range(8)]
            found.engine.store(found.request, *new)
            if stats.not_admitted_chunks:
                break
        assert found.reasons(new[-1]) == ["not_admitted"]


def test_lost_without_a_report(tmp_path: Path, runner: str) -> None:
    server = Server(tmp_path / "redis").start()
    try:
        with site(tmp_path, f"{server.url}?runner={runner}") as found:
            found.engine.store(found.request, *KEYS[:2])
            server.client().flushall()
            found.engine.manager.reset_cache()
            assert found.engine.settle(found.engine.begin("again"), *KEYS[:2])[0] == "MISS"
            assert found.reasons(KEYS[0]) == ["load.not_found"]
    finally:
        server.kill()


def test_an_engine_of_another_namespace_is_no_witness(tmp_path: Path, url: str) -> None:
    with site(tmp_path, url, namespace={"model": "other"}) as found:
        found.engine.store(found.request, KEYS[0])
        found.engine.manager.reset_cache(ResetScope.ALL)
        found.engine.rest()
        assert found.reasons(KEYS[0]) == [None]
