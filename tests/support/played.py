"""A trace through the command line, as a user plays it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from support.command import kvtier

SLOTS = 40


def write_trace(path: Path) -> tuple[Path, float]:
    """Write prompts that share prefixes.

    Returns:
        The file, and what share of its chunks a cache hits that forgets nothing.
    """
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
    """Play it with so few slots that most hits come from a tier; the report."""
    words = ["--json", "--chunk-bytes", "8KiB", "--slots", str(SLOTS), "--trace", str(trace)]
    done = kvtier("replay", *words, *arguments)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report
