from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.command import kvtier
from support.played import report_of as replay
from support.played import unlimited_hit_rate, write_trace
from support.workloads import count_hits

from kvtier_sdk import TieringConfig, load_policy
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, driver, read_trace
from kvtier_sdk.engine import TieringManager
from kvtier_sdk.types import make_offload_key

CHUNK_BYTES = 8192
HEADER_BYTES = 4096


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "trace.jsonl")[0]


def test_a_trace_hits_what_an_unlimited_cache_hits_and_a_second_process_everything(
    tmp_path: Path,
) -> None:
    trace, unlimited = write_trace(tmp_path / "trace.jsonl")
    # With so few slots, most hits come from the tier.
    words = ("--slots", "40", "--trace", str(trace), "--tier", f"file://{tmp_path}/kv")
    first, second = replay(*words), replay(*words)
    assert first["hit_rate"] == pytest.approx(unlimited)
    assert second["hit_rate"] == 1.0
    for report in (first, second):
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
    host, tier = second["tiers"]
    assert host["hit_blocks"] + tier["hit_blocks"] == second["blocks"]
    assert tier["hit_blocks"] > 0


@pytest.mark.parametrize("slots", ["3", "2000"])
def test_the_closed_loop_is_exact_whatever_the_pool(slots: str) -> None:
    report = replay("--requests", "40", "--slots", slots, "--tier", "memory:")
    assert report["hit_rate"] == unlimited_hit_rate(chat_workload(40, 0))
    assert (report["wrong_bytes"], report["dropped"]) == (0, 0)


@pytest.mark.parametrize("policy", ["lru", "returns"])
def test_the_policy_sees_the_times_of_the_trace_and_hits_as_in_a_simulation(policy: str) -> None:
    # The policy must see the 30 s between requests, although the replay takes only a second.
    workload = [
        dataclasses.replace(request, arrived_s=30.0 * n, stop=f"stop {n % 2}")
        for n, request in enumerate(chat_workload(300, 1))
    ]
    options = {"slots": 100, "chunk_bytes": "8KiB", "policy": policy}
    played = driver.replay(workload, TieringConfig.from_dict(options))
    assert played.hit_chunks == count_hits(workload, load_policy(policy)(), 100)


@pytest.mark.parametrize("tiers", [[], ["memory:?capacity=3MiB"]], ids=["pool", "tier"])
def test_a_recorded_trace_hits_what_its_engine_has_hit(tmp_path: Path, tiers: list[str]) -> None:
    # Use LRU, because the default policy samples chunks by key, and a trace changes the keys.
    options = {"slots": 100, "chunk_bytes": "8KiB", "tiers": tiers, "policy": "lru"}
    recording = {**options, "trace_dir": str(tmp_path / "trace"), "trace_file_size": "40KB"}
    workload = chat_workload(300, 5)
    engine = driver.replay(workload, TieringConfig.from_dict({**recording, "trace_files": 100}))
    assert len(list((tmp_path / "trace").iterdir())) > 1
    recorded = read_trace(tmp_path / "trace")
    assert [len(request.keys) for request in recorded] == [len(r.keys) for r in workload]
    assert {request.chunk_bytes for request in recorded} == {8192}
    again = driver.replay(recorded, TieringConfig.from_dict(options))
    assert [tier.hit_chunks for tier in again.tiers] == [t.hit_chunks for t in engine.tiers]
    # The pool has to evict chunks; otherwise the order of the requests would not matter.
    assert 0 < engine.hit_rate < unlimited_hit_rate(workload)


def test_a_replay_of_an_engines_configuration_leaves_its_trace_and_socket_alone(
    tmp_path: Path, trace: Path
) -> None:
    config = tmp_path / "kv.toml"
    config.write_text(f"trace_dir = '{tmp_path}/trace'\nadmin_socket = '{tmp_path}'\n")
    replay("--config", str(config), "--trace", str(trace))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv.toml", "trace.jsonl"]


def test_the_size_of_a_chunk_is_the_traces_own_or_is_asked_for(tmp_path: Path, trace: Path) -> None:
    for words in (("replay", "--slots", "40"), ("plan", "--recompute", "40ms")):
        done = kvtier(*words, "--trace", str(trace))
        assert done.returncode == 2
        assert "it does not say how large a chunk is" in done.stderr
        assert "--chunk-bytes" in done.stderr
    known = tmp_path / "known.jsonl"
    lines = [{**json.loads(line), "chunk_bytes": 2**21} for line in trace.read_text().splitlines()]
    known.write_text("\n".join(map(json.dumps, lines)))
    done = kvtier("plan", "--trace", str(known), "--recompute", "40ms", "--json")
    assert json.loads(done.stdout)["suggested"]["pool_bytes"] % 2**21 == 0


def test_a_request_that_hits_all_of_the_pool_still_gets_room_for_its_end() -> None:
    keys = tuple(make_offload_key(bytes([number]) * 32) for number in range(5))
    played = [ReplayRequest("short", keys[:4]), ReplayRequest("long", keys)]
    config = TieringConfig.from_dict({"slots": 4, "chunk_bytes": 64})
    assert driver.replay(played, config).hit_chunks == 4


def test_spilling_hits_what_writing_through_hits_for_fewer_stores() -> None:
    through, spilled = (
        driver.replay(
            chat_workload(150, 4),
            TieringConfig.from_dict(
                {"slots": 60, "chunk_bytes": 4096, "tiers": [f"memory:?store_policy={policy}"]}
            ),
        )
        for policy in ("through", "on_evict")
    )
    assert spilled.hit_chunks == through.hit_chunks
    assert (spilled.dropped, spilled.wrong_bytes) == (0, 0)
    assert 0 < spilled.tiers[1].stored_chunks < through.tiers[1].stored_chunks


def test_waiting_for_a_tier_is_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    end_step = TieringManager.on_schedule_end

    def count(manager: TieringManager) -> None:
        nonlocal steps
        steps += 1
        end_step(manager)

    monkeypatch.setattr(TieringManager, "on_schedule_end", count)
    monkeypatch.setattr(driver, "_STEP_S", 60.0)
    options = {"slots": 1000, "chunk_bytes": "8KiB", "tiers": [f"file://{tmp_path}"]}
    for _ in range(2):
        steps = 0
        driver.replay(chat_workload(40, 0), TieringConfig.from_dict(options))
        # A request needs at most three steps: lookup, load, store. One more step ends the run.
        assert steps <= 3 * 40 + 1


def test_the_comparison_can_fail(tmp_path: Path) -> None:
    arguments = ("--requests", "20", "--tier", f"file://{tmp_path}/kv")
    replay(*arguments)
    victim = files(tmp_path / "kv")[0]
    with victim.open("r+b") as file:
        file.seek(HEADER_BYTES + 100)
        (byte,) = file.read(1)
        file.seek(HEADER_BYTES + 100)
        file.write(bytes([byte ^ 1]))
    unverified = tmp_path / "unverified.toml"
    unverified.write_text("verify = false\n")
    assert replay(*arguments, "--config", str(unverified), status=1)["wrong_bytes"] > 0
    report = replay(*arguments)
    assert report["wrong_bytes"] == 0
    assert report["failures"] == {"file.load.corrupt": 1}


def test_bad_input_is_one_clear_line_and_nothing_is_made(tmp_path: Path, trace: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    lines = trace.read_text().splitlines()
    lines[16] = '{"hash_ids": [1, "x"]}'
    broken.write_text("\n".join(lines))
    blocker = tmp_path / "file"
    blocker.touch()
    root = tmp_path / "kv"
    config = tmp_path / "kv.toml"
    config.write_text("polcy = 'lru'")
    cases = {
        "missing.jsonl: No such file": ("--trace", str(tmp_path / "missing.jsonl")),
        "line 17: 'hash_ids' should be": ("--trace", str(broken)),
        "no backend 'fil'; did you mean 'file'": ("--tier", f"fil://{root}"),
        "is below one chunk": ("--tier", f"file://{root}?capacity=4KiB"),
        "Not a directory": ("--tier", f"file://{blocker}/kv"),
        "make the pool smaller": ("--slots", "1000000000"),
        "'64KX'": ("--chunk-bytes", "64KX"),
        "command line: option 'policy'": ("--config", str(config), "--policy", "lrv"),
        f"{config}: unknown option 'polcy'; did you mean 'policy'": ("--config", str(config)),
        "no.toml: No such file": ("--config", "no.toml"),
        "--recompute: '40' has no unit": ("--recompute", "40"),
        "--recompute should be more than 0": ("--recompute", "0s"),
    }
    before = sorted(tmp_path.iterdir())
    for message, arguments in cases.items():
        done = kvtier("replay", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stdout == ""
    assert sorted(tmp_path.iterdir()) == before


def test_a_file_says_what_no_flag_says(tmp_path: Path) -> None:
    config = tmp_path / "kv.toml"
    config.write_text(
        f"""
        pool_bytes = "320KiB"
        chunk_bytes = "8KiB"

        [[tiers]]
        type = "file"
        name = "disk"
        root = "{tmp_path}/kv"

        [[tiers]]
        url = "memory:?capacity=1MiB"
        """
    )
    common = ("replay", "--json", "--requests", "40")
    done = kvtier(*common, "--config", str(config))
    assert done.returncode == 0, done.stderr
    by_file = json.loads(done.stdout)
    assert [tier["name"] for tier in by_file["tiers"]] == ["host", "disk", "memory"]
    assert files(tmp_path / "kv")
    # The command-line options override the file's. A pool of 2,000 slots does not evict chunks.
    done = kvtier(*common, "--config", str(config), "--slots", "2000", "--tier", "memory:?name=m")
    host, memory = json.loads(done.stdout)["tiers"]
    assert (host["evicted_blocks"], by_file["tiers"][0]["evicted_blocks"] > 0) == (0, True)
    assert memory["name"] == "m"
