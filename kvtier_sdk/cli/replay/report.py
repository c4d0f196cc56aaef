from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtier_sdk.cli.replay.sessions import SessionHits
from kvtier_sdk.cli.replay.workload import ReplayRequest
from kvtier_sdk.metrics import TierStats


class ReplayHistory:
    """The requests' hits and waits, in order of arrival, and the hits at each depth of a prompt.

    ``arrived_s`` is the arrival time, in the workload, of the request that the replay began last.
    """

    def __init__(self, workload: Sequence[ReplayRequest], sources: int) -> None:
        self.arrived_s = 0.0
        self.chunks = array("q", (len(request.keys) for request in workload))
        self.tokens = [request.tokens for request in workload]
        self.wait_s = array("d", bytes(8 * len(workload)))
        self.hits = [array("q", bytes(8 * len(workload))) for _ in range(sources)]
        longest = max(self.chunks, default=0)
        self.hits_at = [array("q", bytes(8 * longest)) for _ in range(sources)]

    def note_hits(self, number: int, depth: int, sources: Sequence[int]) -> None:
        """Record the source of each hit from ``depth`` on: a tier's number, or -1 for the pool."""
        for at, source in enumerate(sources, depth):
            self.hits[source + 1][number] += 1
            self.hits_at[source + 1][at] += 1


class TimeSaved(NamedTuple):
    """The time that an engine would need to compute a tier's hits, minus their load time."""

    name: str
    compute_s: float
    load_s: float
    saved_s: float


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The results of one replay.

    Attributes:
        chunks: number of chunks in the requests; a trace calls them blocks.
        hit_chunks: number of these chunks that need not be computed.
        compared_bytes: number of loaded bytes, all of which were compared with the stored bytes.
        tiers: the counters of the primary tier, then of each secondary tier.
        left_over: pinned slots, slots in flight, requests and jobs at the end; all should be 0.
        history: each request's hits and wait, which :meth:`as_json` omits.
        sessions: the hits by session, if the workload names sessions.
        recompute_s: the engine's time to compute a chunk; ``None`` if the user gave no time.
    """

    requests: int
    chunks: int
    hit_chunks: int
    chunk_bytes: int
    compared_bytes: int
    wrong_bytes: int
    elapsed_s: float
    tiers: list[TierStats]
    left_over: dict[str, int]
    history: ReplayHistory
    sessions: SessionHits | None = None
    recompute_s: float | None = None

    @property
    def hit_rate(self) -> float:
        """The fraction of chunks that were hits, 0.0 to 1.0."""
        return self.hit_chunks / self.chunks if self.chunks else 0.0

    @property
    def dropped(self) -> int:
        """The number of chunks whose store or load was dropped for lack of room."""
        return sum(sum(tier.dropped.values()) for tier in self.tiers)

    @property
    def failures(self) -> dict[str, int]:
        """The number of failed chunks, by ``tier.operation.reason``."""
        return {
            f"{tier.name}.{reason}": count
            for tier in self.tiers
            for reason, count in sorted(tier.failures.items())
        }

    @property
    def saved_tokens(self) -> list[int]:
        """For each tier, the number of prompt tokens that its hits saved."""
        # Use the mean tokens per chunk of each prompt, because the last chunk may not be full.
        of_each = [
            zip(hits, self.history.tokens, self.history.chunks, strict=True)
            for hits in self.history.hits
        ]
        return [
            sum(tokens * hits // chunks for hits, tokens, chunks in of if chunks) for of in of_each
        ]

    @property
    def time_saved(self) -> list[TimeSaved]:
        """The time that each tier saved, followed by the sum; empty without ``recompute_s``."""
        if self.recompute_s is None:
            return []
        times = [
            (of.name, of.hit_chunks * self.recompute_s, of.job_s["load"].total) for of in self.tiers
        ]
        times.append(("all", sum(of[1] for of in times), sum(of[2] for of in times)))
        return [TimeSaved(*of, saved_s=of[1] - of[2]) for of in times]

    def as_json(self) -> dict[str, Any]:
        """Return the report in its published format, in which a chunk is called a block."""
        return {
            "requests": self.requests,
            "blocks": self.chunks,
            "hit_blocks": self.hit_chunks,
            "hit_rate": self.hit_rate,
            "block_bytes": self.chunk_bytes,
            "compared_bytes": self.compared_bytes,
            "wrong_bytes": self.wrong_bytes,
            "dropped": self.dropped,
            "failures": self.failures,
            "elapsed_s": self.elapsed_s,
            "left_over": self.left_over,
            "tiers": [_tier_json(tier) for tier in self.tiers],
            "saved_tokens": self.saved_tokens,
            "sessions": self.sessions and self.sessions.as_json(),
            "recompute_s": self.recompute_s,
            "time_saved": [of._asdict() for of in self.time_saved],
        }


def _tier_json(tier: TierStats) -> dict[str, Any]:
    return {
        "name": tier.name,
        "type": tier.backend,
        "hit_blocks": tier.hit_chunks,
        "stored_blocks": tier.stored_chunks,
        "loaded_blocks": tier.loaded_chunks,
        "evicted_blocks": tier.evicted_chunks,
        "evicted_unread_blocks": tier.evicted_unread_chunks,
        "not_admitted_blocks": tier.not_admitted_chunks,
        "bytes_stored": tier.stored_bytes,
        "bytes_loaded": tier.loaded_bytes,
        "store_s": tier.job_s["store"].total,
        "load_s": tier.job_s["load"].total,
        "failures": dict(tier.failures),
        "dropped": dict(tier.dropped),
        "errors": tier.errors,
    }
