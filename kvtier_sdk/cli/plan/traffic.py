"""Counts a workload's hits in pools and tiers of any size, and forecasts later hits."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from functools import cache
from itertools import chain, takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvtier_sdk.cli.replay.workload import ReplayRequest
from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.registry import load_policy
from kvtier_sdk.tiering.records import SlotState
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey

LRU = "lru"
# The maximum weight of a reuse in a forecast, so that no single old chunk decides the result.
_MOST_WEIGHT = 8.0
# A forecast skips this first share of a window, because few previous uses are known there.
_BEGIN = 0.3

_Floats = npt.NDArray[np.float64]


class Window(NamedTuple):
    """A span of a workload; if ``is_forecast`` is true, the span of equal length after it."""

    start_s: float = -math.inf
    end_s: float = math.inf
    is_forecast: bool = False


class Flow(NamedTuple):
    """Numbers of chunks in a span of time. In a forecast, the numbers are expected values.

    A chunk is a hit if it and all earlier chunks of its request are present.
    """

    asked: float
    pool_hits: float
    tier_hits: float
    stored: float  # chunks that the tier gets

    @property
    def hit_rate(self) -> float:
        return (self.pool_hits + self.tier_hits) / max(1.0, self.asked)


class Traffic:
    """All uses of chunks in a workload, in order, stored as arrays."""

    def __init__(self, workload: Sequence[ReplayRequest]) -> None:
        self.workload = workload
        numbers: dict[OffloadKey, int] = {}
        keys = chain.from_iterable(request.keys for request in workload)
        uses = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
        lengths = [len(request.keys) for request in workload]
        self.distinct_chunks, self.chunks = len(numbers), sum(lengths)
        #: The cache sizes to forecast, in chunks: powers of two, until all distinct chunks fit.
        self.sizes = [1 << max(0, 2 * max(lengths, default=0) - 1).bit_length()]
        while self.sizes[-1] < self.distinct_chunks:
            self.sizes.append(2 * self.sizes[-1])
        self._at_s = np.repeat([request.arrived_s for request in workload], lengths)
        # For each use, the index of the first use in the same request.
        self._first = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
        # Each use's time since the chunk's previous use; infinite for a first use.
        order = np.argsort(uses, kind="stable")
        again = np.flatnonzero(np.diff(uses[order]) == 0)
        self._age_s: _Floats = np.full(self.chunks, np.inf)
        self._age_s[order[again + 1]] = self._at_s[order[again + 1]] - self._at_s[order[again]]
        self._residents = cache(self._find_residents)

    def flow(self, policy: str, pool_slots: int, tier_chunks: int, window: Window) -> Flow:
        """Count hits and stores of a pool and a write-through LRU tier; 0 chunks mean no tier."""
        in_pool, in_tier = self._residents(policy, pool_slots), self._residents(LRU, tier_chunks)
        uses, reuses = self._weights(window)
        absent = ~(in_pool | in_tier)
        absent_before: npt.NDArray[np.int64] = np.cumsum(absent) - absent
        hits = ~absent & (absent_before == absent_before[self._first])
        asked, found = uses.sum(), reuses @ hits
        # Scale the hits down, because their weights can add up to more than the uses.
        scale = min(1.0, asked / max(1.0, found))
        return Flow(
            asked=asked,
            pool_hits=scale * (reuses @ (hits & in_pool)),
            tier_hits=scale * (reuses @ (hits & ~in_pool)),
            stored=max(0.0, asked - reuses @ in_tier) if tier_chunks else 0.0,
        )

    def _weights(self, window: Window) -> tuple[_Floats, _Floats]:
        """Return two weights per use: one to count uses, and one to count reuses."""
        length_s = window.end_s - window.start_s
        start_s = window.start_s + (length_s * _BEGIN if window.is_forecast else 0.0)
        uses = ((self._at_s >= start_s) & (self._at_s < window.end_s)).astype(np.float64)
        if not window.is_forecast:
            return uses, uses
        # A window shows a reuse only if it contains the chunk's previous use too. Long gaps rarely
        # fit into a window, so reuses after long gaps get more weight.
        away_s = np.clip(self._age_s, length_s * _BEGIN, length_s * (1 - 1 / _MOST_WEIGHT))
        return uses / (1 - _BEGIN), uses * length_s / (length_s - away_s)

    def _find_residents(self, policy: str, size: int) -> npt.NDArray[np.bool_]:
        """Return one boolean per use: true if a cache of ``size`` chunks still has the chunk."""
        if size >= self.distinct_chunks:
            return np.isfinite(self._age_s)
        if not size:
            return np.zeros(self.chunks, np.bool_)
        found = bytearray()
        played = play(self.workload, load_policy(policy)(), size)
        for request, held in zip(self.workload, played, strict=True):
            found += bytes(map(held.__contains__, request.keys))
        return np.frombuffer(found, np.bool_)


def play(
    workload: Sequence[ReplayRequest], policy: EvictionPolicy, slots: int
) -> Iterator[Container[OffloadKey]]:
    """Yield the contents of a simulated host pool at each request's arrival."""
    policy.open(slots)
    primary = PrimaryTier(slots, 1, policy)
    by_key = primary.by_key
    for request in workload:
        primary.now_s = policy.now_s = request.arrived_s
        yield by_key
        for key in takewhile(by_key.__contains__, request.keys):
            by_key[key].hit_step = primary.step
        # A request computes and offers all chunks from its first miss on, even present chunks.
        used = [key for key in dict.fromkeys(request.keys) if key in by_key]
        new = [key for key in dict.fromkeys(request.keys) if key not in by_key]
        taken, _ = primary.take(len(new))
        primary.assign(new[: len(taken)], taken, SlotState.WRITING)
        context = request.context
        primary.publish(taken, context)
        for slot in taken:
            primary.unpin(slot)
        primary.access(used, context)
        policy.on_request_finished(context, request.stop)
        primary.step += 1
