"""Tiers are drained and resumed on a running engine through its admin socket."""

from __future__ import annotations

import getpass
import json
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.command import kvtier
from support.live import live
from support.server import free_port
from typer.testing import CliRunner

from kvtier_sdk import (
    LookupResult,
    Namespace,
    OffloadKey,
    RequestContext,
    SystemClock,
    TieringConfig,
)
from kvtier_sdk.cli.app import app
from kvtier_sdk.cli.engine import ask
from kvtier_sdk.cli.replay import chat_workload, read_trace
from kvtier_sdk.engine import OperatorServices, open_manager, open_pool

WORKLOAD = chat_workload(9, 7)


def test_an_engine_that_opens_its_manager_again_goes_on_serving_its_operator(
    tmp_path: Path,
) -> None:
    """Under vLLM the first manager is still closing when the second one opens."""
    path, trace, port = tmp_path / "engine.sock", tmp_path / "trace", free_port()
    options = {"slots": 8, "chunk_bytes": 64, "tiers": ["memory:"], "metrics_port": port}
    options |= {"admin_socket": str(path), "trace_dir": str(trace)}
    config = TieringConfig.from_dict(options)
    services = OperatorServices(config, SystemClock(), 64)
    with open_pool(config) as pool, ExitStack() as first, ExitStack() as second:
        first.enter_context(open_manager(pool, config, Namespace({}), services=services))
        ask(path, {"command": "drain", "tier": "memory"})
        manager = second.enter_context(open_manager(pool, config, Namespace({}), services=services))
        assert not ask(path, {"command": "status"})["tiers"][0]["is_drained"]
        first.close()
        request = RequestContext("r")
        manager.on_new_request(request)
        manager.prepare_store(WORKLOAD[0].keys[:3], request)
        manager.on_request_finished(request)
        assert ask(path, {"command": "drain", "tier": "memory"})["is_drained"]
        assert manager.clients[0].is_drained
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
            assert b"kvtier_pool_slots 8.0" in page.read()
    services.close()
    assert not path.exists()
    assert len(read_trace(trace)) == 1


@pytest.fixture
def idle(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "engine.sock"
    tiers = [f"file://{tmp_path}/kv?runner=process", "memory:"]
    with live(tiers, slots=60, admin_socket=str(path)) as engine:
        request = engine.begin("r")
        engine.store(request, *WORKLOAD[0].keys)
        engine.manager.on_request_finished(request)
        yield path


def test_the_commands_at_an_engine_that_sleeps(
    idle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = kvtier("top", idle, "--once", "--interval", "100ms")
    assert (done.returncode, done.stderr) == (0, "")
    title, _, head, *rows, room = done.stdout.splitlines()
    assert "host pool of 60 slots" in title
    assert head.split()[:4] == ["tier", "state", "hits/s", "share"]
    assert {len(line) for line in (head, *rows)} <= set(range(81)), "a terminal's width"
    assert [row.split()[:2] for row in rows] == [["host", "ok"], ["file", "ok"], ["memory", "ok"]]
    assert room.startswith("file: ")

    done = kvtier("drain", idle, "memory")
    assert done.stdout.startswith("memory is out; nothing of it is under way after 0.")
    status = json.loads(kvtier("top", idle, "--once", "--json").stdout)
    assert [tier["is_drained"] for tier in status["tiers"]] == [False, True]
    assert status["tiers"][0]["stored_chunks"] == len(WORKLOAD[0].keys)
    assert "drained" in kvtier("top", idle, "--once", "--interval", "100ms").stdout
    assert kvtier("resume", idle, "memory").stdout == "memory is in\n"
    assert ask(idle, {"command": "status"})["tiers"][1]["is_drained"] is False
    taken_out, put_back = caplog.messages[-2:]
    assert taken_out.startswith(f"memory: the tier is taken out by {getpass.getuser()} (uid ")
    assert put_back.startswith("memory: the tier is put back by ")


def test_what_is_asked_of_nobody_or_of_no_tier_is_one_line(idle: Path, tmp_path: Path) -> None:
    done = kvtier("drain", idle, "memry")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "kvtier: no tier 'memry'; did you mean 'memory'? there are: file, memory\n"
    )
    for command in (["top"], ["drain", "memory"], ["resume", "memory"]):
        done = kvtier(command[0], tmp_path / "no.sock", *command[1:])
        assert (done.returncode, done.stdout) == (1, "")
        assert (
            done.stderr
            == f"kvtier: no engine answers at {tmp_path}/no.sock: No such file or directory\n"
        )
    assert ask(idle, {"command": "stop"})["error"].startswith("no command 'stop'")


def test_an_operator_pins_prefetches_and_forgets_a_session(tmp_path: Path) -> None:
    path, keys = tmp_path / "engine.sock", WORKLOAD[0].keys[:2]
    with (
        live([f"file://{tmp_path}/kv"], slots=8, policy="lru", admin_socket=str(path)) as engine,
        ThreadPoolExecutor() as operator,
    ):
        manager = engine.manager

        def told(*command: object) -> tuple[int, str]:
            begun = operator.submit(kvtier, command[0], path, *command[1:])
            while not begun.done():
                engine.step()
            return begun.result().returncode, begun.result().stdout

        def serve(name: str, keys: Sequence[OffloadKey], session: str | None = None) -> None:
            request = RequestContext(name, session=session)
            manager.on_new_request(request)
            engine.store(request, *keys)
            manager.on_request_finished(request)

        serve("r", keys, "system-prompt")
        assert told("pin", "system-prompt", "--for", "60s") == (
            0,
            "pin for session 'system-prompt': accepted, 2 chunks, 60 s\n",
        )
        assert told("pin", "system-prompt", "--for", "0s")[0] == 0
        for number in range(1, 9):
            serve(f"r{number}", WORKLOAD[number].keys[-2:])
        assert not any(key in manager._by_key for key in keys)
        assert told("prefetch", "system-prompt") == (
            0,
            "prefetch for session 'system-prompt': accepted, 2 chunks\n",
        )
        assert all(key in manager._by_key for key in keys)
        assert told("forget", "system-prompt")[0] == 0
        manager.on_schedule_end()
        manager.on_schedule_end()
        assert not any(key in manager._by_key for key in keys)
        assert told("pin", "system-prompt") == (
            1,
            "pin for session 'system-prompt': refused, 0 chunks: no chunks of session "
            "'system-prompt' are known\n",
        )


def test_a_hint_for_an_engine_that_sleeps(idle: Path) -> None:
    done = kvtier("pin", idle, "chat")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "the engine is idle; it will do this with its next request\n"
    assert ask(idle, {"command": "hint", "verb": "pim"})["error"].startswith("no hint 'pim'")
    assert ask(idle, {"command": "receipt", "number": 99}) == {"error": "no hint has the number 99"}


DEVICE = (
    "an engine's device may still serve them, and store them again: reset its prefix cache "
    "(vLLM: POST /reset_prefix_cache, in development mode), or restart it\n"
)


def test_rm_reaches_the_pools_of_running_engines(tmp_path: Path, runner: str) -> None:
    path, file = tmp_path / "engine.sock", tmp_path / "kv.json"
    tiers = [f"file://{tmp_path}/kv?runner={runner}"]
    file.write_text(json.dumps({"slots": 60, "admin_socket": str(path), "tiers": tiers}))
    keys = WORKLOAD[0].keys[:3]
    with live(tiers, namespace={"model": "qwen"}) as engine:
        engine.store(engine.begin("r"), *keys)
    with live(tiers, admin_socket=str(path), namespace={"model": "llama"}) as engine:
        manager, request = engine.manager, engine.begin("r")
        engine.store(request, *keys)
        said = removed(file, "qwen")
        assert "3 chunks deleted" in said
        assert f"{path}: its engine has another namespace, and keeps its pool" in said
        assert manager.lookup_prefix(keys, request) == (3, False)
        manager.on_schedule_end()
        with ThreadPoolExecutor() as operator:
            removing = operator.submit(removed, file, "llama")
            while not removing.done():
                engine.step()
            said = removing.result()
        assert "3 chunks deleted" in said
        assert "engine.sock: 3 chunks forgotten" in said
        assert said.endswith(DEVICE)
        assert manager.lookup(keys[0], request) is not LookupResult.HIT
        engine.store(request, *keys)
        said = removed(file, "llama")
        assert "3 chunks deleted" in said, "they were stored again"
        assert "is idle; it will forget before its next lookup" in said
        assert manager.lookup(keys[1], request) is not LookupResult.HIT
        manager.on_request_finished(request)


def test_rm_says_that_it_finds_no_engine(tmp_path: Path) -> None:
    file, sockets = tmp_path / "kv.json", tmp_path / "sockets"
    sockets.mkdir()
    tiers = [f"file://{tmp_path}/kv?runner=thread"]
    file.write_text(json.dumps({"slots": 60, "admin_socket": str(sockets), "tiers": tiers}))
    with live(tiers) as engine:
        engine.store(engine.begin("r"), *WORKLOAD[0].keys[:3])
    said = removed(file, "m")
    assert said.endswith(f"since there is none at {sockets}: pools may still serve these\n{DEVICE}")


def removed(file: Path, model: str) -> str:
    done = CliRunner().invoke(app, ["tier", "rm", str(file), "--model", model, "--yes"])
    assert done.exit_code == 0, done.output
    return done.stdout
