"""``kvtier events`` shows an engine's history, both while it runs and after it has stopped."""

from __future__ import annotations

import json
from pathlib import Path

from support.command import kvtier
from support.live import live
from support.redis_server import Server
from support.runners import KEYS

from kvtier_sdk.cli.engine import ask


def test_a_killed_store_and_a_drain_are_in_the_history(tmp_path: Path, runner: str) -> None:
    server, socket = Server(tmp_path / "redis").start(), tmp_path / "engine.sock"
    url = (
        f"{server.url}?name=far&runner={runner}&retries=0&breaker_failures=1"
        "&probe_interval=100ms&max_probe_interval=200ms"
    )
    try:
        with live([url], admin_socket=str(socket)) as engine:
            engine.there_and_back(engine.begin("first"), *KEYS[:8])
            server.kill()
            engine.settle(engine.begin("second"), KEYS[8])
            while not engine.manager.stats[1].reads_open:
                engine.step()
            server.start()
            while engine.manager.stats[1].reads_open:
                engine.step()
            ask(socket, {"command": "drain", "tier": "far"})
            ask(socket, {"command": "resume", "tier": "far"})
            expected = [
                *("offloads to host, far", "reads are refused until a probe succeeds"),
                *("reads are taken again, after", "far: the tier is taken out by "),
                "far: the tier is put back by ",
            ]
            engine.manager.on_schedule_end()
            server.wait_until(lambda: expected[-1] in kvtier("events", socket).stdout, "written")
            shown = kvtier("events", socket, "--since", "1h").stdout
            places = [shown.find(text) for text in expected]
            assert -1 not in places
            assert places == sorted(places), shown
    finally:
        server.kill()
    assert not socket.exists()
    for source in (socket, tmp_path / "engine.events.jsonl"):
        after = kvtier("events", source, "--json")
        found = [json.loads(line)["text"] for line in after.stdout.splitlines()]
        assert any(text.startswith(expected[-1]) for text in found), after.stderr
    assert kvtier("events", socket, "--since", "1us").stdout == (
        "nothing has happened in the last 1us\n"
    )


def test_an_event_at_no_date_is_left_out(tmp_path: Path) -> None:
    history = tmp_path / "engine.events.jsonl"
    times = ["1e300", "Infinity", "-1e15", "4e9"]
    history.write_text("".join(f'{{"time": {of}, "text": "at {of}"}}\n' for of in times))
    done = kvtier("events", history, "--since", "100000d")
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
    assert done.stdout.endswith("at 4e9\n")


def test_where_no_engine_has_been_there_is_no_history(tmp_path: Path) -> None:
    done = kvtier("events", tmp_path / "engine.sock")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"kvtier: no history of an engine: {tmp_path}/engine.events.jsonl: "
        "No such file or directory\n"
    )
