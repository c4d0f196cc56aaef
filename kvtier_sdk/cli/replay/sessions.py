"""Counts the hits of sessions and of their turns, if a trace names sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from kvtier_sdk.cli.replay.workload import ReplayRequest


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


class SessionTurns(NamedTuple):
    """A group of requests, each of which continues a session.

    Attributes:
        after: the reason why the session's previous answer ended; ``None`` if unknown.
        whole_prefix: true if these requests hit all leading chunks that they share with the
            session's previous request.
        median_wait_s: median time since the arrival of the session's previous request.
    """

    after: str | None
    whole_prefix: bool
    turns: int
    hit_rate: float
    median_wait_s: float


@dataclass(frozen=True, slots=True)
class SessionHits:
    """The hits of a workload's sessions.

    Attributes:
        hit_rates: each session's hit rate, sorted.
        hitless: number of sessions with several requests, but no hit after the first request.
        turns: groups of the requests that follow each session's first request.
    """

    hit_rates: Sequence[float]
    hitless: int
    turns: Sequence[SessionTurns]

    def as_json(self) -> dict[str, Any]:
        return {
            "sessions": len(self.hit_rates),
            "sessions_without_later_hits": self.hitless,
            "hit_rate": {f"p{of}": percentile(self.hit_rates, of) for of in (10, 50, 90)},
            "turns": [of._asdict() for of in self.turns],
        }


def session_hits(workload: Iterable[ReplayRequest], hits: Iterable[int]) -> SessionHits | None:
    """Group each request's hits by session; return ``None`` if the workload names no session."""
    sessions: dict[str, list[tuple[ReplayRequest, int]]] = defaultdict(list)
    for request, found in zip(workload, hits, strict=True):
        if request.session is not None:
            sessions[request.session].append((request, found))
    if not sessions:
        return None
    later = [requests[1:] for requests in sessions.values() if len(requests) > 1]
    return SessionHits(
        hit_rates=sorted(
            _rate((len(request.keys), found) for request, found in requests)
            for requests in sessions.values()
        ),
        hitless=sum(not any(found for _, found in requests) for requests in later),
        turns=_turns(sessions.values()),
    )


def _turns(sessions: Iterable[Sequence[tuple[ReplayRequest, int]]]) -> list[SessionTurns]:
    groups: dict[tuple[str, bool], list[tuple[int, int, float]]] = defaultdict(list)
    for requests in sessions:
        for (before, _), (request, found) in pairwise(requests):
            # ``known`` has the hits and the first missed chunk. If the previous request begins with
            # the same chunks, the missed chunk was lost. Otherwise all shared chunks were hits.
            known = request.keys[: found + 1]
            whole = found == len(request.keys) or known != before.keys[: found + 1]
            wait_s = request.arrived_s - before.arrived_s
            groups[before.stop or "", whole].append((len(request.keys), found, wait_s))
    return [
        SessionTurns(
            after=after or None,
            whole_prefix=whole,
            turns=len(group),
            hit_rate=_rate((chunks, found) for chunks, found, _ in group),
            median_wait_s=percentile(sorted(wait_s for *_, wait_s in group), 50),
        )
        for (after, whole), group in sorted(groups.items(), reverse=True)
    ]


def _rate(counts: Iterable[tuple[int, int]]) -> float:
    chunks, hits = map(sum, zip(*counts, strict=True))
    return hits / chunks if chunks else 0.0
