from __future__ import annotations

import os
import signal
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.live import CHUNK_BYTES, live
from support.runners import KEYS

from kvtier_sdk import ConfigError, TieringConfig, TierSpec
from kvtier_sdk.cli.engine import ask
from kvtier_sdk.engine import check_services

CAPACITY = 8 * CHUNK_BYTES


def test_a_running_tier_follows_and_its_restart_does_not(tmp_path: Path, runner: str) -> None:
    path = tmp_path / "engine.sock"
    url = f"file://{tmp_path}/kv?runner={runner}&load_deadline=20s&lookup_deadline=20s&min_free=0"
    with live([TierSpec.from_url(url)], admin_socket=str(path), slots=8) as engine:
        stats = engine.manager.stats[1]
        request = engine.begin("r")
        engine.store(request, *KEYS[:4])
        engine.store(request, *KEYS[4:8])
        assert (stats.stored_chunks, stats.evicted_chunks) == (8, 0)
        done = kvtier("set", path, "file", f"capacity={CAPACITY}", "load_deadline=10s")
        assert (done.returncode, done.stderr) == (0, "")
        capacity, deadline, restart = done.stdout.splitlines()
        assert capacity.split() == ["capacity", "32", "KiB", "configured:", "-"]
        assert deadline.split() == ["load_deadline", "10", "s", "configured:", "20", "s"]
        assert restart == "A restart returns to the configuration: write there what should stay."
        # The change and the jobs reach a tier's process separately, so some jobs may come first.
        for key in KEYS[8:]:
            engine.store(request, key)
            if stats.evicted_chunks:
                break
        engine.store(request, KEYS[-1])
        assert sum(one.stat().st_size for one in tmp_path.glob("kv/*/*/*.kv")) <= CAPACITY
        shown = kvtier("top", path, "--once", "--interval", "100ms").stdout
        assert "file: capacity is 32 KiB, configured: -\n" in shown
        assert kvtier("set", path, "file", "capacity=none").stdout.startswith("capacity  -\n")
        assert "capacity is" not in kvtier("top", path, "--once", "--interval", "100ms").stdout
    said = kvtier("events", path).stdout
    user = f"(uid {os.getuid()}, pid "
    assert f"file: capacity_bytes was None and is {CAPACITY} now, set by " in said
    assert f"file: load_deadline_s was 20.0 and is 10.0 now, set by root {user}" in said
    with live([TierSpec.from_url(url)], admin_socket=str(path), slots=8):
        assert "configured" not in kvtier("set", path, "file").stdout


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"capacity": "2GX"}, "file: option 'capacity': '2GX': unit 'GX' is none of B,"),
        ({"capacity": "1KiB"}, "capacity 1 KiB is below one chunk"),
        ({"capacity": str(CHUNK_BYTES)}, "capacity 4 KiB is below one chunk with its header"),
        ({"ttl": "2h", "max_age": "1h"}, "option 'max_age' is 3600 s but should be at least 'ttl'"),
        ({"concurrency": "9", "root": "/"}, "a restart of the engine is needed to change "),
        ({"capcity": "1GiB"}, "unknown option 'capcity'; did you mean 'capacity'?"),
        ({"retries": None}, "option 'retries' is None but should be a whole number"),
        ({"compress": "fp8"}, "a restart of the engine is needed to change 'fp8'"),
        ({"runner": "thread"}, "a restart of the engine is needed to change runner"),
    ],
)
def test_all_is_changed_or_nothing(tmp_path: Path, changes: dict[str, str], says: str) -> None:
    path = tmp_path / "engine.sock"
    url = f"file://{tmp_path}/kv?runner=thread"
    with live([url], admin_socket=str(path)):
        request = {"command": "set", "tier": "file", "options": {"load_deadline": "9s", **changes}}
        assert says in ask(path, request)["error"]
        options = ask(path, {**request, "options": {}})["options"]
        assert options
        assert all(configured == now for configured, now in options.values())


def test_a_process_that_starts_again_has_the_changed_options(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    url = f"file://{tmp_path}/kv?runner=process&lookup_deadline=20s&min_free=0"
    with live([TierSpec.from_url(url)], admin_socket=str(path), slots=8) as engine:
        (client,) = engine.manager.clients
        request = {"command": "set", "tier": "file", "options": {"capacity": str(CAPACITY)}}
        assert ask(path, request)["options"]["capacity"] == [None, CAPACITY]
        os.kill(client._runner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        while not client.stats.restarts:
            engine.step()
        asking = engine.begin("r")
        for key in KEYS[:9]:
            engine.store(asking, key)
        assert client.stats.stored_chunks == 9
        assert sum(one.stat().st_size for one in tmp_path.glob("kv/*/*/*.kv")) <= CAPACITY


def test_a_process_keeps_its_options_if_it_refuses_new_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec = TierSpec.from_url(f"file://{tmp_path}/kv?runner=process&lookup_deadline=20s")
    with live([spec]) as engine:
        runner: Any = engine.manager.clients[0]._runner
        # Bypass the engine, because it would refuse these options before they reach the process.
        runner._call_soon(runner._child.change, {"retries": 1, "capacity": "1 parsec"})
        while "its process keeps the options that it has" not in caplog.text:
            engine.step()
        assert "tier 'file': option 'capacity': '1 parsec'" in caplog.text
        engine.there_and_back(engine.begin("r"), *KEYS[:4])


def test_several_changes_at_once_are_made_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"

    def change(seconds: int) -> object:
        both = {"load_deadline": f"{seconds}s", "store_deadline": f"{seconds}s"}
        options = ask(path, {"command": "set", "tier": "memory", "options": both})["options"]
        return options["load_deadline"][1], options["store_deadline"][1]

    with live(["memory:"], admin_socket=str(path)), ThreadPoolExecutor(4) as operators:
        answers = list(operators.map(change, range(1, 13)))
    assert answers == [(seconds, seconds) for seconds in range(1, 13)]


def test_the_budget_of_hints_is_the_host_pools(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with live(["memory:"], admin_socket=str(path), slots=8) as engine:
        leases = engine.manager._primary.leases
        assert leases.budget == 2
        done = kvtier("set", path, "host", "hint_budget=50%", "hint_duration=1m")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.splitlines()[0].split() == ["hint_budget", "50%", "configured:", "25%"]
        assert (leases.budget, engine.manager._hints.max_duration_s) == (4, 60.0)
        done = kvtier("set", path, "host", "slots=9")
        assert "host: a restart of the engine is needed to change slots" in done.stderr


def test_tiers_of_one_place_keep_the_same_options(tmp_path: Path) -> None:
    path, url = tmp_path / "engine.sock", f"file://{tmp_path}/kv?runner=thread"
    with live([url, f"{url}&name=other"], admin_socket=str(path)):
        answer = ask(path, {"command": "set", "tier": "other", "options": {"capacity": "1GiB"}})
        assert "and so does 'file' (tiers[0]), with other options (capacity)" in answer["error"]


def test_by_default_the_socket_is_where_only_its_user_can_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "kvtier-own"
    monkeypatch.setattr("kvtier_sdk.config.tiering_config.own_directory", lambda: own)
    monkeypatch.setattr("kvtier_sdk.admin.own_directory", lambda: own)
    with live(["memory:"], admin_socket="auto"):
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert [one.name for one in own.glob("*.sock")] == [f"kvtier-{os.getpid()}.sock"]
        # Add a socket that no process listens on. The directory still has only one live engine.
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(own / "kvtier-1.sock"))
        assert "load_deadline" in kvtier("set", own, "memory").stdout
    own.chmod(0o755)
    with pytest.raises(ConfigError, match="is not a directory that only this user can enter"):
        check_services(TieringConfig.from_dict({"slots": 1, "admin_socket": "auto"}))


def test_what_is_taken_names_its_owner_before_the_engine_opens(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket() as taken, live(["memory:"], admin_socket=str(path)):
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for option in ({"metrics_port": port}, {"admin_socket": str(path)}):
            config = TieringConfig.from_dict({"slots": 1, **option})
            with pytest.raises(ConfigError, match=rf"process {os.getpid()} \(.*python"):
                check_services(config)


def test_a_socket_of_a_relative_path_stays_where_the_configuration_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with live(["memory:"], admin_socket="engine.sock"):
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert "load_deadline" in kvtier("set", tmp_path / "engine.sock", "memory").stdout
    assert not (tmp_path / "engine.sock").exists()
