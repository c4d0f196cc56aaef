"""The main job, end to end: a workload through the command line, and again by a new client."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SLOTS = 40


def write_trace(path: Path) -> tuple[Path, float]:
    """Prompts that share prefixes, and what a cache that forgets nothing hits of them."""
    rng = random.Random(11)
    known = [[0]]
    seen: set[tuple[int, ...]] = set()
    hits = chunks = 0
    lines = []
    for number in range(60):
        prompt = rng.choice(known)[: rng.randint(1, 20)]
        prompt = prompt + [1000 * (number + 1) + n for n in range(rng.randint(1, 12))]
        known.append(prompt)
        prefixes = [tuple(prompt[: n + 1]) for n in range(len(prompt))]
        hits += sum(prefix in seen for prefix in prefixes)
        chunks += len(prefixes)
        seen.update(prefixes)
        lines.append(json.dumps({"timestamp": number, "hash_ids": prompt}))
    path.write_text("\n".join(lines) + "\n")
    return path, hits / chunks


def replay(trace: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-c", "from kvtier_sdk.cli import main; main()", "replay", "--json"]
    done = subprocess.run(
        [*command, "--chunk-bytes", "8KiB", "--slots", str(SLOTS), "--trace", trace, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_trace_hits_what_an_unlimited_cache_hits_and_a_new_client_everything(
    server, tmp_path
) -> None:
    trace, unlimited = write_trace(tmp_path / "trace.jsonl")
    first = replay(trace, "--tier", f"{server.url}?ttl=1h")
    assert first["hit_rate"] == pytest.approx(unlimited)
    second = replay(trace, "--tier", f"{server.url}?ttl=1h")
    assert second["hit_rate"] == 1.0
    for report in (first, second):
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
    host, redis = second["tiers"]
    assert host["hit_blocks"] + redis["hit_blocks"] == second["blocks"]
    assert redis["hit_blocks"] > 0
