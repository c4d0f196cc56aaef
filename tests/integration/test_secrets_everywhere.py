"""Passwords from a file and from the environment must not appear in any output."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.live import Live, live
from support.redis_server import Server
from support.runners import KEYS
from support.tier_process import tier_processes

from kvtier_sdk import TierAuthError, metric_samples

#: Part of every secret in this module.
NEEDLE = "hunter2"
IN_ENVIRONMENT, IN_FILE = f"{NEEDLE} & /sons='1'", f"{NEEDLE} & /sons='2'"
VARIABLE = "KVTIER_TEST_PASSWORD"


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Server]]:
    monkeypatch.setenv(VARIABLE, IN_ENVIRONMENT)
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(IN_FILE)
    servers = {"environment": Server(tmp_path / "one"), "file": Server(tmp_path / "two")}
    for server, password in zip(servers.values(), (IN_ENVIRONMENT, IN_FILE), strict=True):
        server.start()
        server.ask("CONFIG", "SET", "requirepass", password)
        server.client_options["password"] = password
    yield servers
    for server in servers.values():
        server.kill()


@pytest.fixture
def urls(servers: dict[str, Server], tmp_path: Path) -> list[str]:
    one, two = servers.values()
    return [
        f"redis://:${{{VARIABLE}}}@127.0.0.1:{one.port}?name=one",
        f"{two.url}?name=two&password_file={tmp_path / 'secret'}",
    ]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    handler = logging.FileHandler(tmp_path / "log")
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s %(message)s"))
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield tmp_path / "log"
    root.removeHandler(handler)
    root.setLevel(level)
    handler.close()


def command(*arguments: object) -> str:
    done = kvtier(*map(str, arguments))
    return f"{done.stdout}{done.stderr}"


def use(engine: Live, name: str) -> None:
    request = engine.begin(name)
    engine.there_and_back(request, *KEYS[:32])
    engine.manager.on_request_finished(request)


def change(server: Server) -> None:
    server.ask("CONFIG", "SET", "requirepass", f"{NEEDLE}, changed")
    server.client_options["password"] = f"{NEEDLE}, changed"
    server.ask("CLIENT", "KILL", "TYPE", "normal")


def test_no_password_is_in_anything_that_can_be_seen(
    servers: dict[str, Server], urls: list[str], log: Path, tmp_path: Path, runner: str
) -> None:
    entries = [{"url": url, "runner": runner} for url in urls]
    config = tmp_path / "kv.json"
    config.write_text(json.dumps({"slots": 16, "tiers": entries}))
    seen: dict[str, Any] = {"check": command("check", config)}
    seen["check --json"] = command("check", "--json", config)
    seen["backends"] = command("backends", "--json", "redis")
    assert json.loads(seen["check --json"])["ok"]
    with live([f"{url}&runner={runner}" for url in urls], slots=16) as engine:
        use(engine, "well")
        started = tier_processes(os.getpid())
        assert len(started) == (2 if runner == "process" else 0)
        seen["processes"] = started
        for server in servers.values():
            change(server)
        for key in KEYS[32:]:
            engine.store(engine.begin(key.hex()), key)
        assert all(tier.failures["store.auth"] for tier in engine.manager.stats[1:])
        seen["metrics"] = [asdict(stats) for stats in engine.manager.stats]
        seen["samples"] = list(metric_samples(engine.manager.stats))
        seen["repr"] = repr((engine.manager, vars(engine.manager)))
        seen["stacks"] = "".join(
            line
            for frame in sys._current_frames().values()
            for line in traceback.format_stack(frame)
        )
        for child in started:
            os.kill(child, signal.SIGABRT)
        engine.rest()
    seen["check of what fails"] = command("check", config)
    for url in urls:
        with pytest.raises(TierAuthError) as refused, live([f"{url}&runner={runner}&required=yes"]):
            pass
        seen[f"traceback of {url}"] = "".join(traceback.format_exception(refused.value))
        logging.getLogger("engine").error("no tier", exc_info=refused.value)
    seen["log"] = log.read_text()

    for what, text in seen.items():
        assert NEEDLE not in str(text), what
    # Check that the outputs show the configuration; otherwise the search above proves nothing.
    secret = tmp_path / "secret"
    assert f'password = "${{{VARIABLE}}}"' in seen["check"]
    assert f'password_file = "{secret}"' in seen["check"]
    assert "invalid username-password pair" in seen["check of what fails"]
    assert "WRONGPASS" in seen["log"]
    assert "test_secrets_everywhere" in seen["stacks"]
    if runner == "process":
        assert "Aborted" in seen["log"]
        assert all("PATH=" in told for told in started.values())
