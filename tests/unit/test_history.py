from __future__ import annotations

import json
import logging
import re
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.live import CHUNK_BYTES, live
from support.runners import KEYS

from kvtier_sdk import ConfigError, SystemClock, TieringConfig
from kvtier_sdk.operator import history as module
from kvtier_sdk.operator.history import EventHistory, history_beside, read_events
from kvtier_sdk.operator.services import OperatorServices

LOG = logging.getLogger("kvtier.tier.far")
FACTS: dict[str, object] = {"model": "m", "tokens_per_chunk": 16}


@contextmanager
def opened(path: Path) -> Iterator[EventHistory]:
    history = EventHistory(path.with_name("engine.sock"), CHUNK_BYTES, SystemClock())
    assert history.path == path
    try:
        yield history
    finally:
        history.close()


def texts(path: Path) -> list[str]:
    return [event["text"] for event in read_events(path)]


@pytest.mark.parametrize(
    ("socket", "file"),
    [
        ("engine.sock", "engine.events.jsonl"),
        (".", "kvtier.events.jsonl"),
        ("kvtier-7.sock", "kvtier.events.jsonl"),
    ],
)
def test_engines_with_a_socket_each_in_a_directory_have_one_history(
    tmp_path: Path, socket: str, file: str
) -> None:
    assert history_beside(tmp_path / socket) == tmp_path / file


def test_warnings_are_kept_and_lesser_lines_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engine.events.jsonl"
    caplog.set_level(logging.DEBUG, "kvtier")
    with opened(path):
        LOG.warning("far: stores are %s", "refused")
        LOG.info("far: a detail")
        logging.getLogger("other").warning("not ours")
    LOG.warning("after the end")
    assert texts(path) == ["far: stores are refused"]
    (event,) = read_events(path)
    assert event["level"] == "WARNING"
    assert not list(read_events(path, event["time"] + 0.001))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_lines_are_masked_and_no_bad_one_reaches_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "engine.events.jsonl"
    with opened(path):
        logging.getLogger("kvtier.plugin").warning("%d chunks", "many")
        LOG.warning("cannot reach redis://:hunter2@cache:6379")
    assert "cannot log '%d chunks'" in texts(path)[0]
    assert "redis://:***@cache:6379" in texts(path)[1]


def test_a_service_that_cannot_be_opened_leaves_no_history_open(tmp_path: Path) -> None:
    before = threading.active_count()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        options = {"slots": 1, "admin_socket": str(tmp_path), "events_endpoint": endpoint}
        with pytest.raises(ConfigError, match="cannot listen"):
            OperatorServices(TieringConfig.from_dict(options), SystemClock(), CHUNK_BYTES)
    assert threading.active_count() == before
    assert not any(isinstance(one, EventHistory) for one in logging.getLogger("kvtier").handlers)


def test_the_base_for_kubernetes_has_room_for_a_history() -> None:
    """If the volume were too small, the history would stop before it renames its file."""
    deploy = Path(__file__).parents[2] / "deploy/kubernetes"
    assert '"admin_socket": "/run/kvtier"' in (deploy / "kv.json").read_text()
    engine = (deploy / "engine.yaml").read_text()
    found = re.search(r"name: run\n +emptyDir: \{medium: Memory, sizeLimit: (\d+)Mi}", engine)
    assert found
    assert int(found[1]) << 20 > 2 * module._FILE_BYTES


def test_two_files_are_the_most_that_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILE_BYTES", 4000)
    monkeypatch.setattr(module, "_WRITE_S", 0.001)
    path = tmp_path / "engine.events.jsonl"
    for number in range(100):
        with opened(path):
            LOG.warning("%d", number)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "engine.events.jsonl",
        "engine.events.jsonl.1",
    ]
    assert all(file.stat().st_size <= 4000 for file in tmp_path.iterdir())
    kept = list(map(int, texts(path)))
    assert kept == list(range(kept[0], 100))
    assert len(kept) > 30


def test_engines_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engine.events.jsonl"
    with opened(path), opened(path), ThreadPoolExecutor(4) as threads:
        list(threads.map(LOG.warning, map(str, range(50))))
    assert sorted(map(int, texts(path))) == sorted([*range(50)] * 2)


def test_a_full_disk_costs_events_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_WRITE_S", 0.001)
    path = tmp_path / "engine.events.jsonl"
    path.write_text('{"time": 1, "text": "before"}\n{"time": 2, "te')
    with opened(path) as history:
        history.path = Path("/dev/full")
        for _ in range(3):
            LOG.warning("lost")
            while history._waiting:
                pass
        history.path = path
        history._thread.join(0.05)
        LOG.warning("kept")
    assert sum("events are missing" in text for text in caplog.messages) == 1
    assert texts(path)[0] == "before"
    assert texts(path)[-1] == "kept"


def test_a_file_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "link.events.jsonl").symlink_to(tmp_path / "file")
    (tmp_path / "a.events.jsonl").mkdir()
    for name, reason in (("no/engine", "No such file"), ("a", "directory"), ("link", "symbolic")):
        with pytest.raises(ConfigError, match=f"option 'admin_socket': cannot write .*{reason}"):
            EventHistory(tmp_path / name, CHUNK_BYTES, SystemClock())


QUIET = """
import logging, sys
from pathlib import Path
from kvtier_sdk import SystemClock
from kvtier_sdk.operator.history import EventHistory
history = EventHistory(Path(sys.argv[1]), 64, SystemClock())
logging.getLogger("kvtier.tier.far").warning("far: refused")
history.close()
"""


def test_a_program_without_a_log_still_prints_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-c", QUIET, str(tmp_path / "engine.sock")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "far: refused\n"
    assert texts(tmp_path / "engine.events.jsonl") == ["far: refused"]


def test_the_lost_chunks_of_a_minute_are_one_event(tmp_path: Path) -> None:
    path = tmp_path / "engine.events.jsonl"
    with live(
        ["memory:?capacity=20KiB"], admin_socket=str(path.with_name("engine.sock")), slots=8
    ) as engine:
        request = engine.begin("r")
        for start in range(0, 32, 8):
            engine.store(request, *KEYS[start : start + 8])
        host, memory = (of.evicted_chunks for of in engine.manager.stats)
    (event,) = (event for event in read_events(path) if "chunks" in event)
    assert event["chunks"]["host evicted"] == host > 8
    assert event["chunks"]["memory evicted"] == memory > 8
    assert event["text"].startswith(f"chunks of a minute: host evicted {host}, memory evicted ")


def speeds(path: Path) -> list[Any]:
    return [event["chunk_s"] for event in read_events(path) if "chunk_s" in event]


def test_an_engine_begins_with_the_speed_that_the_last_one_measured(tmp_path: Path) -> None:
    path = tmp_path / "engine.events.jsonl"
    options: dict[str, Any] = {
        "admin_socket": str(path.with_name("engine.sock")),
        "namespace": FACTS,
    }
    with live(["memory:"], **options) as engine:
        assert engine.manager.savings.rate.chunk_s is None
        engine.manager.savings.rate.chunk_s = 0.012
    assert speeds(path) == [0.012]
    assert "a chunk is computed in 12 ms" in texts(path)
    with live(["memory:"], **options) as engine:
        assert engine.manager.savings.rate.chunk_s == 0.012
    with live(
        ["memory:"], admin_socket=str(path.with_name("engine.sock")), namespace={"model": "another"}
    ) as engine:
        assert engine.manager.savings.rate.chunk_s is None
    with live(["memory:"], **options, chunk_bytes=2 * CHUNK_BYTES) as engine:
        assert engine.manager.savings.rate.chunk_s is None


def test_a_killed_engine_has_noted_its_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_S", 0.001)
    path = tmp_path / "engine.events.jsonl"
    socket = str(path.with_name("engine.sock"))
    with live(["memory:"], admin_socket=socket, namespace=FACTS) as engine:
        # A small change is noted only once an hour, or at the end.
        for chunk_s, noted in ((0.01, [0.01]), (0.013, [0.01]), (0.02, [0.01, 0.02])):
            engine.manager.savings.rate.chunk_s = chunk_s
            end_s = SystemClock().now_s() + 20.0
            while len(speeds(path)) < len(noted) and SystemClock().now_s() < end_s:
                engine.step()
            engine.step()
            assert speeds(path) == noted


def test_what_is_in_the_file_cannot_stop_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "engine.events.jsonl"
    lines: list[object] = [
        *(1, None, [], {}, {"time": "x", "text": "y"}, {"time": 1}),
        {"time": 1, "text": "z", "model": ["m"], "chunk_bytes": CHUNK_BYTES, "chunk_s": 1.5},
        {"time": 1, "text": "z", "model": "m", "chunk_bytes": CHUNK_BYTES, "chunk_s": "1"},
    ]
    path.write_bytes(b"\xff\n" + "".join(f"{json.dumps(line)}\n" for line in lines).encode())
    with live(
        ["memory:"], admin_socket=str(path.with_name("engine.sock")), namespace=FACTS
    ) as engine:
        assert engine.manager.savings.rate.chunk_s is None
