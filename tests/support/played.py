"""Plays workloads through the command line, as a user would."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk.cli.replay import ReplayRequest, read_trace
from support.command import kvtier_json

SLOTS = 40


def unlimited_hit_rate(workload: Sequence[ReplayRequest]) -> float:
    """Return the share of chunks in prefixes that occurred in earlier prompts."""
    seen: set[bytes] = set()
    hits = 0
    for request in workload:
        for key in request.keys:
            if key not in seen:
                break
            hits += 1
        seen.update(request.keys)
    return hits / sum(len(request.keys) for request in workload)


def write_trace(path: Path) -> tuple[Path, float]:
    """Write prompts that share prefixes; return the file and an unlimited cache's hit rate."""
    rng = random.Random(11)
    known = [[0]]
    lines = []
    for number in range(60):
        prompt = rng.choice(known)[: rng.randint(1, 20)]
        prompt = prompt + [1000 * (number + 1) + n for n in range(rng.randint(1, 12))]
        known.append(prompt)
        lines.append(json.dumps({"timestamp": number, "hash_ids": prompt}))
    path.write_text("\n".join(lines) + "\n")
    return path, unlimited_hit_rate(read_trace(path))


def replay(trace: Path, *arguments: str) -> dict[str, Any]:
    """Play a trace with so few slots that most hits come from a tier; return the report."""
    return report_of("--slots", str(SLOTS), "--trace", str(trace), *arguments)


def report_of(*arguments: str, status: int = 0, **environment: str) -> dict[str, Any]:
    words = ("replay", "--chunk-bytes", "8KiB", *arguments)
    return kvtier_json(*words, status=status, **environment)


def check_two_replays(trace: Path, unlimited: float, url: str) -> None:
    """Replay a trace twice; check that the first hit rate is ``unlimited`` and the second is 1."""
    first, second = (replay(trace, "--tier", url) for _ in range(2))
    assert first["hit_rate"] == pytest.approx(unlimited)
    assert second["hit_rate"] == 1.0
    for report in (first, second):
        assert (report["wrong_bytes"], report["dropped"], report["failures"]) == (0, 0, {})
    host, tier = second["tiers"]
    assert host["hit_blocks"] + tier["hit_blocks"] == second["blocks"]
    assert tier["hit_blocks"] > 0
