from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import ConfigError, SystemClock, make_offload_key
from kvtier_sdk import trace as module
from kvtier_sdk.cli.replay import read_trace
from kvtier_sdk.trace import TraceRecorder

KEYS = [make_offload_key(bytes([number]) * 32) for number in range(64)]
MakeRecorder = Callable[..., TraceRecorder]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRecorder]:
    made: list[TraceRecorder] = []

    def build(**options: Any) -> TraceRecorder:
        sizes = {"file_bytes": 2**20, "files": 4, "chunk_bytes": 2**21, **options}
        made.append(TraceRecorder(tmp_path / "trace", clock=SystemClock(), **sizes))
        return made[-1]

    yield build
    for recorder in made:
        recorder.close()


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "trace").iterdir())


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    texts = [path.read_text() for path in files(tmp_path)]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_a_request_is_a_line_in_mooncakes_format(make: MakeRecorder, tmp_path: Path) -> None:
    recorder = make()
    now_s = SystemClock().now_s()
    recorder.record(now_s + 1.5, KEYS[:3], {})
    recorder.record(now_s + 2.0, KEYS[:2], {})
    recorder.close()
    first, second = lines(tmp_path)
    names = ["timestamp", "input_length", "output_length", "hash_ids", "chunk_bytes"]
    assert list(first) == names
    assert 1500 <= first["timestamp"] < 1600
    assert len(set(first["hash_ids"])) == 3
    assert second["hash_ids"] == first["hash_ids"][:2]
    assert recorder.written == 2
    read = read_trace(tmp_path / "trace")
    assert [(len(request.keys), request.chunk_bytes) for request in read] == [
        (3, 2**21),
        (2, 2**21),
    ]


def test_an_engines_own_account_adds_what_was_not_looked_up(
    make: MakeRecorder, tmp_path: Path
) -> None:
    recorder = make()
    ends = {chunk: 16 * (place + 1) for place, chunk in enumerate(KEYS[:6])}
    # No lookup named the first chunk (it was on the device) or the last two (they are new).
    recorder.record(0.0, KEYS[1:4], ends)
    recorder.record(0.0, KEYS[:4], {})
    recorder.close()
    first, second = lines(tmp_path)
    assert first["hash_ids"] == second["hash_ids"]
    assert (first["input_length"], second["input_length"]) == (64, 0)


def test_no_chunk_can_be_told_by_its_number(make: MakeRecorder, tmp_path: Path) -> None:
    for _ in range(2):
        recorder = make()
        recorder.record(0.0, KEYS[:1], {})
        recorder.close()
    one, other = lines(tmp_path)
    assert one["hash_ids"] != other["hash_ids"], "each recording has a salt of its own"
    assert 0 <= one["hash_ids"][0] < 2**63


def test_files_are_private_rotated_and_bounded(make: MakeRecorder, tmp_path: Path) -> None:
    recorder = make(file_bytes=1000, files=3)
    for number in range(100):
        recorder.record(float(number), KEYS, {})
    recorder.close()
    assert recorder.written == 100
    # Each line is longer than ``file_bytes``, so each line gets its own file.
    assert len(files(tmp_path)) == 3
    assert stat.S_IMODE((tmp_path / "trace").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(tmp_path)} == {0o600}
    late = [line["timestamp"] for line in lines(tmp_path)]
    assert late == sorted(late)
    assert late[-1] - late[0] == 2000, "the newest are kept"


def test_a_file_holds_no_more_than_its_size(make: MakeRecorder, tmp_path: Path) -> None:
    recorder = make(file_bytes=2000, files=100)
    for _ in range(50):
        recorder.record(0.0, KEYS[:8], {})
    recorder.close()
    assert len(lines(tmp_path)) == 50
    sizes = [path.stat().st_size for path in files(tmp_path)]
    assert max(sizes) <= 2000
    assert min(sizes[:-1]) > 1000


def test_what_another_recorder_writes_is_not_removed(make: MakeRecorder, tmp_path: Path) -> None:
    alive, ended = make(files=1), make(files=1)
    for recorder in (alive, ended):
        recorder.record(0.0, KEYS, {})
    ended.close()
    make(files=1).close()
    assert files(tmp_path) == [alive.path]


def test_a_kill_loses_at_most_a_second(make: MakeRecorder, tmp_path: Path) -> None:
    recorder = make()
    recorder.record(0.0, KEYS, {})
    done = threading.Event()
    for _ in range(300):
        if recorder.written or done.wait(0.1):
            break
    assert len(lines(tmp_path)) == 1


def test_a_file_of_somebody_else_stays(make: MakeRecorder, tmp_path: Path) -> None:
    kept = tmp_path / "trace" / "trace-of-last-week.jsonl"
    kept.parent.mkdir()
    kept.touch()
    make(files=1).close()
    assert files(tmp_path) == [kept]


def test_too_many_requests_are_dropped_counted_and_said(
    make: MakeRecorder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 1)
    monkeypatch.setattr(module, "_INTERVAL_S", 60.0)
    recorder = make()
    for _ in range(3):
        recorder.record(0.0, KEYS, {})
    recorder.close()
    assert (recorder.written, recorder.dropped) == (1, 2)
    assert len(lines(tmp_path)) == 1
    assert "2 requests are missing from the trace" in caplog.text


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_once_and_no_half_line_stays(
    make: MakeRecorder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = make()
    recorder.record(0.0, KEYS, {})
    while not recorder.written:
        threading.Event().wait(0.05)
    full = os.open("/dev/full", os.O_WRONLY)
    good = os.dup(recorder._fd)
    os.dup2(full, recorder._fd)
    for _ in range(3):
        recorder.record(0.0, KEYS, {})
    while recorder.dropped < 3:
        threading.Event().wait(0.05)
    os.dup2(good, recorder._fd)
    recorder.record(0.0, KEYS[:1], {})
    recorder.close()
    os.close(full)
    os.close(good)
    assert [len(line["hash_ids"]) for line in lines(tmp_path)] == [64, 1]
    assert caplog.text.count("No space left on device") == 1


def test_a_directory_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory, reason in (
        (tmp_path / "file", "File exists"),
        (tmp_path / "file" / "trace", "Not a directory"),
        (tmp_path / "no" / "trace", "No such file"),
    ):
        with pytest.raises(ConfigError, match=f"trace_dir.*{reason}"):
            TraceRecorder(directory, file_bytes=1, files=1, chunk_bytes=1, clock=SystemClock())


def test_lines_are_played_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 20, "hash_ids": [1, 2]}\n{"timestamp": 10, "hash_ids": [1]}\n{"timesta'
    )
    assert [len(request.keys) for request in read_trace(path)] == [1, 2]
