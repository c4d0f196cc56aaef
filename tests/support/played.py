"""Plays workloads through the command line, as a user would."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvtier_sdk.cli.replay import ReplayRequest, read_trace
from support.command import kvtier_json


def unlimited_hit_rate(workload: Sequence[ReplayRequest]) -> float:
    """Return the hit rate of an unlimited cache."""
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


def report_of(*arguments: str, status: int = 0, **environment: str) -> dict[str, Any]:
    words = ("replay", "--chunk-bytes", "8KiB", *arguments)
    return kvtier_json(*words, status=status, **environment)
