from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.command import kvtier, kvtier_json

from kvtier_sdk.cli.replay import ReplayRequest, SessionHits, SessionTurns
from kvtier_sdk.cli.replay.sessions import percentile, session_hits
from kvtier_sdk.types import make_offload_key

#: Three requests of one session, and one request of another. All chunks fit into the pool.
LINES = [
    {"timestamp": 1000, "hash_ids": [1, 2], "session": 7, "stop": "tool_use"},
    {"timestamp": 2000, "hash_ids": [5], "session": 8, "stop": "end_turn"},
    {"timestamp": 9000, "hash_ids": [1, 2, 3], "session": 7, "stop": "end_turn"},
    {"timestamp": 69000, "hash_ids": [1, 2, 3, 4], "session": 7},
]


def request(session: str | None, ids: str, arrived_s: float, stop: str | None) -> ReplayRequest:
    keys = tuple(make_offload_key(letter.encode() * 32) for letter in ids)
    return ReplayRequest(str(arrived_s), keys, arrived_s=arrived_s, session=session, stop=stop)


def test_hits_are_grouped_by_session_and_by_what_a_turn_follows() -> None:
    played = [
        (request("a", "12", 0, "tool_use"), 0),
        (request("b", "5", 1, "end_turn"), 0),
        (request("a", "123", 4, "end_turn"), 2),
        # Chunk 2 was in the session's previous request, but is not found this time.
        (request("a", "1234", 64, None), 1),
        # This request shares no chunk with its session's previous request, so it loses no chunk.
        (request("b", "67", 101, None), 0),
        (request(None, "9", 102, "tool_use"), 0),
        (request("c", "", 103, None), 0),
        # All chunks are found, so the session loses no chunk, although its last prompt was longer.
        (request("a", "12", 104, None), 2),
    ]
    assert session_hits(*zip(*played, strict=True)) == SessionHits(
        hit_rates=[0.0, 0.0, 5 / 11],
        hitless=1,
        turns=[
            SessionTurns("tool_use", True, 1, 2 / 3, 4.0),
            SessionTurns("end_turn", True, 1, 0.0, 100.0),
            SessionTurns("end_turn", False, 1, 1 / 4, 60.0),
            SessionTurns(None, True, 1, 1.0, 40.0),
        ],
    )


def test_a_workload_without_sessions_has_no_hits_by_session() -> None:
    assert session_hits([request(None, "1", 0, None)], [0]) is None


def test_percentiles_are_values_that_occur() -> None:
    values = [float(n) for n in range(20)]
    assert [percentile(values, of) for of in (10, 50, 90, 100)] == [2.0, 10.0, 18.0, 19.0]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "agents.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in LINES).encode()))
    return path


def test_the_report_has_a_table_of_sessions_and_one_of_the_time_saved(trace: Path) -> None:
    page = trace.with_name("page.html")
    words = ("--trace", trace, "--chunk-bytes", "4KiB", "--recompute", "40ms", "--report", page)
    done = kvtier("replay", *words)
    assert (done.returncode, done.stderr) == (0, "")
    sessions = (
        "2 sessions, hit rate of a session: p10 0.00%, median 55.56%, p90 55.56%; "
        "0 of several requests hit nothing after the first"
    )
    tables = [
        sessions,
        "turns after  earlier prefix  turns  hit rate  median wait",
        "tool_use     whole               1    66.67%          8 s",
        "end_turn     whole               1    75.00%         60 s",
        "time saved, at 40 ms of computing a chunk",
        "tier  not computed  loads took   saved",
        "host        200 ms        0 ms  200 ms",
        "all         200 ms        0 ms  200 ms",
    ]
    assert "\n".join(tables) in done.stdout
    written = page.read_text()
    assert sessions in written
    assert "time saved, at 40 ms of computing a chunk" in written


def test_the_json_has_the_same_figures(trace: Path) -> None:
    words = ("replay", "--trace", trace, "--chunk-bytes", "4KiB", "--slots", "8")
    report = kvtier_json(*words, "--recompute", "40ms", "--tier", "memory:")
    sessions = report["sessions"]
    assert (sessions["sessions"], sessions["sessions_without_later_hits"]) == (2, 0)
    assert sessions["hit_rate"] == {"p10": 0.0, "p50": 5 / 9, "p90": 5 / 9}
    turn = {"after": "tool_use", "whole_prefix": True, "turns": 1, "hit_rate": 2 / 3}
    assert sessions["turns"][0] == {**turn, "median_wait_s": 8.0}
    assert report["recompute_s"] == 0.04
    saved = report["time_saved"]
    assert [of["name"] for of in saved] == ["host", "memory", "all"]
    for of, tier in zip(saved, report["tiers"], strict=False):
        assert of["compute_s"] == pytest.approx(0.04 * tier["hit_blocks"])
        assert of["load_s"] == tier["load_s"]
        assert of["saved_s"] == of["compute_s"] - of["load_s"]
    assert saved[-1]["compute_s"] == pytest.approx(0.04 * report["hit_blocks"])


def test_without_the_time_of_a_chunk_no_time_is_reported(trace: Path) -> None:
    words = ("replay", "--trace", trace, "--chunk-bytes", "4KiB")
    assert "time saved" not in kvtier(*words).stdout
    report = kvtier_json(*words)
    assert (report["recompute_s"], report["time_saved"]) == (None, [])


def test_a_configuration_names_the_time_of_a_chunk_too(trace: Path) -> None:
    config = trace.with_name("kv.toml")
    config.write_text("recompute = '1s'\n")
    words = ("replay", "--trace", trace, "--chunk-bytes", "4KiB", "--config", config)
    assert kvtier_json(*words)["recompute_s"] == 1
    assert kvtier_json(*words, "--recompute", "40ms")["recompute_s"] == 0.04


def test_hits_save_their_part_of_each_prompts_tokens(tmp_path: Path) -> None:
    lines = [
        {"hash_ids": [1, 2], "input_length": 1000},
        {"hash_ids": [1, 2, 3], "input_length": 1500},
        {"hash_ids": [1, 2, 9]},
        {"hash_ids": [], "input_length": 7},
        {"hash_ids": [1], "input_length": "long"},
    ]
    trace, page = tmp_path / "trace.jsonl", tmp_path / "page.html"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    words = ("--trace", str(trace), "--chunk-bytes", "4KiB", "--recompute", "40ms")
    assert kvtier_json("replay", *words)["saved_tokens"] == [1000]
    done = kvtier("replay", *words, "--report", page)
    rows = [line.split() for line in done.stdout.splitlines()]
    # Only two of the five hits are in prompts with a known length.
    assert ["host", "1,000", "20", "KiB"] in rows
    assert ["tier", "tokens", "not", "computed", "moved"] in rows
    assert '<th scope="row">host</th><td>1,000</td><td>20 KiB</td>' in page.read_text()
