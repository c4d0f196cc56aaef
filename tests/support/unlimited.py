"""The hit rate of an unlimited cache, as a reference for other hit rates."""

from __future__ import annotations

from collections.abc import Sequence

from kvtier_sdk.cli.replay import ReplayRequest


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
