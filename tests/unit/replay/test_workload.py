from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from kvtier_sdk.cli.replay import read_trace
from kvtier_sdk.errors import ReplayError

#: Two turns of session 7, and between them the last turn of session 8.
LINES = [
    {"timestamp": 1000, "hash_ids": [1, 2], "session": 7, "stop": "tool_use", "think_s": 4},
    {"timestamp": 2000, "hash_ids": [5], "session": 8, "stop": "end_turn", "last": True},
    {"timestamp": 9000, "hash_ids": [1, 2, 3], "session": 7, "stop": None},
]


def write(path: Path) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in LINES)
    return path


@pytest.mark.parametrize("name", ["agents.jsonl", "agents.jsonl.gz"])
def test_a_trace_of_agents(tmp_path: Path, name: str) -> None:
    requests = read_trace(write(tmp_path / name))
    assert [(of.arrived_s, of.session, of.stop) for of in requests] == [
        (1.0, "7", "tool_use"),
        (2.0, "8", "end_turn"),
        (9.0, "7", None),
    ]
    assert requests[2].keys[:2] == requests[0].keys
    assert read_trace(tmp_path) == requests


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "agents.jsonl.gz").read_bytes()
    for damaged in (whole[:40], b"no archive", whole[:20] + b"\0\0\0\0" + whole[24:]):
        (tmp_path / "agents.jsonl.gz").write_bytes(damaged)
        with pytest.raises(ReplayError, match=r"agents\.jsonl\.gz"):
            read_trace(tmp_path / "agents.jsonl.gz")
