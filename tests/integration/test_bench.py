from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.command import kvtier, kvtier_json
from support.filled import CHUNK_BYTES, contents, fill, keys_from

from kvtier_sdk import Namespace
from kvtier_sdk.cli.bench import _cpu_s

VLLM = Namespace({"engine": "vllm 0.33", "model": "llama"})
QUICK = ("--chunk", "64KiB", "--batch", "1", "--batch", "4", "--rounds", "2", "--total", "8MiB")


def chunks(root: Path) -> list[Path]:
    return list(root.rglob("*.kv"))


def test_it_measures_tiers_and_leaves_nothing(tmp_path: Path) -> None:
    root, plot = tmp_path / "kv", tmp_path / "bench.svg"
    words = ("bench", f"file://{root}", "memory:", *QUICK, "--plot", plot)
    measured = kvtier_json(*words)["measured"]
    cases = [(of["tier"], of["operation"], of["batch"]) for of in measured]
    operations, tiers = ("store", "load"), ("file", "memory")
    assert cases == [(of, to, n) for n in (1, 4) for to in operations for of in tiers]
    for of in measured:
        # Two batch sizes with two rounds each share the total of 8 MiB, so a round moves 2 MiB.
        assert of["moved_bytes"] == 2 * 2 * 2**20
        assert of["bytes_per_s"] > 1e5
        assert 0 < of["p50_s"] <= of["p99_s"] < 60
        assert of["cpu_s_per_gb"] > 0
    assert root.exists()
    assert chunks(root) == []
    drawing = ET.fromstring(plot.read_text())
    assert drawing.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"file store", "memory load", "MB/s", "4 x 64 KiB"} <= set(texts)


def test_its_table_has_a_line_for_each_case(tmp_path: Path) -> None:
    done = kvtier("bench", f"file://{tmp_path}/kv", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    titles, *rows, note = done.stdout.splitlines()
    assert titles.split() == ["tier", "chunk", "batch", "MB/s", "p50", "p99", "CPU", "s/GB"]
    assert [row.split()[:5] for row in rows] == [
        ["file", operation, "64", "KiB", batch]
        for batch in ("1", "4")
        for operation in ("store", "load")
    ]
    assert note.startswith("4 jobs at a time")


def test_what_is_under_way_is_within_the_total() -> None:
    done = kvtier("bench", "memory:", *QUICK, "--at-once", f"{10**9}")
    assert (done.returncode, done.stderr) == (0, "")


def test_chunks_of_engines_stay(tmp_path: Path) -> None:
    url, keys = f"file://{tmp_path}/kv", keys_from(0, 20)
    fill(url, VLLM, keys)
    assert kvtier("bench", url, *QUICK).returncode == 0
    assert None not in contents(url, VLLM, keys)
    done = kvtier("bench", f"{url}?capacity=8MiB", *QUICK)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "would evict chunks that no benchmark has stored" in done.stderr
    assert VLLM.for_chunks(CHUNK_BYTES).fingerprint[:12] in done.stderr
    assert None not in contents(url, VLLM, keys)


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    arguments = ["bench", f"file://{root}", "--total", "64GiB", "--chunk", "64KiB"]
    command = [sys.executable, "-c", "from kvtier_sdk.cli import main; main()", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while len(chunks(root)) < 20 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert chunks(root) == []


def test_bad_input_is_one_clear_line(tmp_path: Path) -> None:
    cases = {
        "no backend 'fil'; did you mean 'file'": ("fil:///x",),
        "two tiers are named 'memory'": ("memory:", "memory:"),
        "--chunk should be more than 0": ("memory:", "--chunk", "0"),
        "3 rounds of these chunks need 384 MiB": ("memory:", "--total", "64MiB"),
        "does not take 4 jobs of 1 chunks of 1 MiB": (
            *("memory:?max_queue=2MiB", "--chunk", "1MiB", "--batch", "1"),
        ),
    }
    for message, arguments in cases.items():
        done = kvtier("bench", *arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert message in done.stderr
        assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr


def test_its_cpu_time_is_known_while_threads_end() -> None:
    ended = threading.Event()

    def churn() -> None:
        while not ended.is_set():
            for one in [threading.Thread(target=lambda: None) for _ in range(20)]:
                one.start()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert all(_cpu_s() > 0 for _ in range(300))
    finally:
        ended.set()
        thread.join()


def test_a_plan_reads_what_it_prints(tmp_path: Path) -> None:
    devices, trace = tmp_path / "devices.json", tmp_path / "trace.jsonl"
    done = kvtier("bench", "memory:?latency=200ms", *QUICK, "--total", "1MiB", "--json")
    devices.write_text(done.stdout)
    prices = tmp_path / "prices.toml"
    prices.write_text(
        "accelerator_hour = 3\nmemory_month = 1000\n"
        '[[tiers]]\nurl = "memory:"\nmonth = 0.01\nlatency = "1us"\nbandwidth = "100GB"\n'
    )
    lines = [{"timestamp": 1000 * n, "hash_ids": [n % 10]} for n in range(40)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    words = ("plan", "--trace", trace, "--recompute", "10s", "--chunk-bytes", "1MiB")
    words += ("--prices", prices)
    fast, slow = (
        next(of for of in kvtier_json(*words, *more)["options"] if of["tier_bytes"])
        for more in ((), ("--devices", devices))
    )
    loads = [of for of in json.loads(done.stdout)["measured"] if of["operation"] == "load"]
    load_s = min(of["p50_s"] for of in loads) + 2**20 / max(of["bytes_per_s"] for of in loads)
    assert load_s > 0.2
    hits = slow["hit_rate"] - slow["pool_hit_rate"]
    assert slow["first_token_s"] - fast["first_token_s"] == pytest.approx(hits * load_s, rel=0.01)
