"""Counts the hits of each session and of its turns, for a trace that names sessions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvtier_sdk.cli.replay.workload import ReplayRequest


def percentile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


@dataclass(frozen=True, slots=True)
class SessionTurns:
    """Requests after a session's first, by the reason for the wait and by what was left.

    Attributes:
        after: why the session's previous answer ended; ``None`` if the trace does not say.
        whole: true if every leading chunk that these requests share with the session's previous
            request was a hit.
        turns: number of these requests.
        median_wait_s: median time since the arrival of the session's previous request.
    """

    after: str | None
    whole: bool
    turns: int
    chunks: int
    hit_chunks: int
    median_wait_s: float

    @property
    def hit_rate(self) -> float:
        return self.hit_chunks / self.chunks if self.chunks else 0.0


@dataclass(frozen=True, slots=True)
class SessionHits:
    """The hits of a workload's sessions.

    Attributes:
        sessions: number of sessions.
        hitless: number of sessions of several requests that hit nothing after the first.
        hit_rates: each session's hit rate, sorted.
        turns: the requests after each session's first, in groups.
    """

    sessions: int
    hitless: int
    hit_rates: Sequence[float]
    turns: Sequence[SessionTurns]

    def as_json(self) -> dict[str, Any]:
        """Return plain values under the names that a replay's report uses."""
        return {
            "sessions": self.sessions,
            "sessions_without_later_hits": self.hitless,
            "hit_rate": {f"p{of}": percentile(self.hit_rates, of) for of in (10, 50, 90)},
            "turns": [
                {
                    "after": of.after,
                    "whole_prefix": of.whole,
                    "turns": of.turns,
                    "blocks": of.chunks,
                    "hit_blocks": of.hit_chunks,
                    "hit_rate": of.hit_rate,
                    "median_wait_s": of.median_wait_s,
                }
                for of in self.turns
            ],
        }


def session_hits(workload: Iterable[ReplayRequest], hits: Iterable[int]) -> SessionHits | None:
    """Group each request's hits by session; return ``None`` if the workload names no session."""
    played: dict[str, list[tuple[ReplayRequest, int]]] = defaultdict(list)
    for request, found in zip(workload, hits, strict=True):
        if request.session is not None:
            played[request.session].append((request, found))
    if not played:
        return None
    several = [requests for requests in played.values() if len(requests) > 1]
    return SessionHits(
        sessions=len(played),
        hitless=sum(not any(found for _, found in requests[1:]) for requests in several),
        hit_rates=sorted(map(_hit_rate, played.values())),
        turns=_turns(several),
    )


def _hit_rate(requests: Sequence[tuple[ReplayRequest, int]]) -> float:
    return sum(found for _, found in requests) / max(1, sum(len(of.keys) for of, _ in requests))


def _turns(sessions: Iterable[Sequence[tuple[ReplayRequest, int]]]) -> list[SessionTurns]:
    groups: dict[tuple[str, bool], list[tuple[int, int, float]]] = defaultdict(list)
    for requests in sessions:
        for (before, _), (request, found) in pairwise(requests):
            # Hits are leading chunks. If the first miss is a chunk of the request before, it was
            # lost; and if it is not, nothing after it is shared.
            known = request.keys[: found + 1]
            whole = found == len(request.keys) or known != before.keys[: found + 1]
            wait_s = request.arrived_s - before.arrived_s
            groups[before.stop or "", whole].append((len(request.keys), found, wait_s))
    turns = []
    for (after, whole), group in sorted(groups.items(), reverse=True):
        chunks, hits, waits_s = zip(*group, strict=True)
        median_s = percentile(sorted(waits_s), 50)
        turns.append(
            SessionTurns(after or None, whole, len(group), sum(chunks), sum(hits), median_s)
        )
    return turns
