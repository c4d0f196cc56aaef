"""Counts the hits of host pools and tiers of many sizes, without moving a byte."""

from __future__ import annotations

import dataclasses
import math
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any
from zlib import crc32

from kvtier_sdk.cli.replay.workload import ReplayRequest
from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.registry import load_policy
from kvtier_sdk.tiering.records import SlotState
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey

#: A function that advances a progress bar by a number of units, and one that shows such a bar.
Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]

_LRU = "lru"
_HASHES = 2**32
# Simulate a policy with at most this many chunks; use only some keys of a longer workload.
_MOST_PLAYED = 2**17
# Doubling a pool is worth the memory if at least this fraction of all chunks become hits.
_WORTHWHILE = 0.01


def _no_progress(label: str, total: int) -> AbstractContextManager[Advance]:
    return nullcontext(lambda count: None)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """The hits at one size.

    Attributes:
        slots: the size, in chunks that are not compressed.
        hit_chunks: the hits of a pool without tiers, with the chosen policy.
        lru_hit_chunks: the hits of a pool with ``lru`` that holds as many chunks as a tier of this
            size, which may compress them.
    """

    slots: int
    hit_chunks: int
    lru_hit_chunks: int


@dataclass(frozen=True, slots=True)
class PoolSweep:
    """The hits of host pools of many sizes.

    Attributes:
        points: the hits at doubling sizes, from room for two of the longest requests to room for
            every chunk.
        pool: the hits at the configured size.
        share: the fraction of the keys that was simulated; 1.0 if the sweep is exact.
        error: the largest difference in hit rate between the two halves of the simulated keys.
        compression_ratio: the ratio of a chunk's length to its length in a tier.
        others: the same sweep with other policies, if they were asked for.
    """

    policy: str
    requests: int
    chunks: int
    distinct_chunks: int
    points: tuple[SweepPoint, ...]
    pool: SweepPoint
    share: float
    error: float
    compression_ratio: float = 1.0
    others: tuple[PoolSweep, ...] = ()

    @property
    def suggested(self) -> SweepPoint:
        """The smallest pool beyond which no doubling gains a percentage point of hit rate."""
        pairs = list(zip(self.points[:-1], self.points[1:], strict=True))
        for smaller, larger in reversed(pairs):
            if larger.hit_chunks - smaller.hit_chunks >= _WORTHWHILE * self.chunks:
                return larger
        return self.points[0]

    def rate(self, chunks: int) -> float:
        return chunks / self.chunks if self.chunks else 0.0

    def tier_chunks(self, tier: SweepPoint) -> int:
        """Return the number of hits that a tier adds to the hits of the configured pool."""
        return max(0, tier.lru_hit_chunks - self.pool.hit_chunks)

    def as_json(self, chunk_bytes: int) -> dict[str, Any]:
        """Return plain values under the names that a replay's report uses."""

        def point(of: SweepPoint) -> dict[str, Any]:
            return {
                "slots": of.slots,
                "bytes": of.slots * chunk_bytes,
                "hit_blocks": of.hit_chunks,
                "hit_rate": self.rate(of.hit_chunks),
                "tier_hit_blocks": self.tier_chunks(of),
                "tier_hit_rate": self.rate(self.tier_chunks(of)),
            }

        return {
            "policy": self.policy,
            "requests": self.requests,
            "blocks": self.chunks,
            "distinct_blocks": self.distinct_chunks,
            "block_bytes": chunk_bytes,
            "compression_ratio": self.compression_ratio,
            "share": self.share,
            "error": self.error,
            "pool": point(self.pool),
            "points": [point(of) for of in self.points],
            "suggested": point(self.suggested),
            "other_policies": [of.as_json(chunk_bytes) for of in self.others],
        }


def sweep_pool(
    workload: Sequence[ReplayRequest],
    *,
    policy: str = _LRU,
    others: Sequence[str] = (),
    pool_slots: int,
    compression_ratio: float = 1.0,
    progress: Progress = _no_progress,
) -> PoolSweep:
    """Count the hits for every size of the host pool, if requests come one at a time.

    For ``lru``, one pass over the workload counts the exact hits at all sizes. Any other policy is
    simulated once for each size, and for a long workload estimated with only some of its keys. A
    tier holds ``compression_ratio`` times as many chunks as a pool of its size. ``others`` are
    policies to compare with ``policy``. ``progress`` gets a label and a number of steps.
    """
    distinct = {key for request in workload for key in request.keys}
    longest = max((len(request.keys) for request in workload), default=0)
    sizes = _sizes(2 * longest, len(distinct))
    with progress(_LRU, len(workload)) as advance:
        needed = sorted(_slots_needed(workload, advance))
    exact = {slots: bisect_right(needed, slots) for slots in (*sizes, pool_slots)}
    behind = {slots: bisect_right(needed, int(slots * compression_ratio)) for slots in exact}
    chunks = sum(len(request.keys) for request in workload)
    sweeps = []
    for name in (policy, *others):
        hits, share, error = _count(workload, name, exact, chunks, progress)
        points = {slots: SweepPoint(slots, hits[slots], behind[slots]) for slots in exact}
        sweep = PoolSweep(
            policy=name,
            requests=len(workload),
            chunks=chunks,
            distinct_chunks=len(distinct),
            points=tuple(points[slots] for slots in sizes),
            pool=points[pool_slots],
            share=share,
            error=error,
            compression_ratio=compression_ratio,
        )
        sweeps.append(sweep)
    return dataclasses.replace(sweeps[0], others=tuple(sweeps[1:]))


def _count(
    workload: Sequence[ReplayRequest],
    policy: str,
    exact: Mapping[int, int],
    chunks: int,
    progress: Progress,
) -> tuple[Mapping[int, int], float, float]:
    """Return a policy's hits at each size, the share of the keys that was played, and the error."""
    if policy == _LRU:
        return exact, 1.0, 0.0
    if chunks <= _MOST_PLAYED:
        make = load_policy(policy)
        hits = {}
        with progress(policy, len(exact)) as advance:
            for slots in exact:
                hits[slots] = count_hits(workload, make(), slots)
                advance(1)
        return hits, 1.0, 0.0
    # Make two estimates, because their difference shows the error.
    parts = 2 ** math.ceil(math.log2(2 * chunks / _MOST_PLAYED))
    with progress(policy, 2 * len(exact)) as advance:
        one, other = (_play_share(workload, policy, exact, parts, part, advance) for part in (0, 1))
    hits = {slots: (one[slots] + other[slots]) // 2 for slots in exact}
    error = max(abs(one[slots] - other[slots]) for slots in exact) / chunks
    return hits, 2 / parts, error


def _sizes(least: int, most: int) -> list[int]:
    """Return the powers of two from the first >= ``least`` to the first >= ``most``."""
    sizes = [1 << max(0, least - 1).bit_length()]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes


def _slots_needed(workload: Sequence[ReplayRequest], advance: Advance) -> Iterator[int]:
    """Yield the slots that an ``lru`` pool needs for each hit; skip chunks that always miss."""
    # The pool holds the most recently used chunks. A chunk is a hit if the pool holds it and all
    # chunks before it in the request, so the least recently used of these chunks decides (Mattson
    # et al., "Evaluation techniques for storage hierarchies", 1970).
    recency = _Recency(sum(len(request.keys) for request in workload))
    for request in workload:
        deepest = 0
        for key in request.keys:
            depth = recency.depth(key)
            if depth is None:
                break
            deepest = max(deepest, depth)
            yield deepest
        # Use the end of a prefix first, as the pool does, so that its start is evicted last.
        for key in reversed(dict.fromkeys(request.keys)):
            recency.use(key)
        advance(1)


class _Recency:
    """The order of keys by last use, in a Fenwick tree with a mark at the last use of each key."""

    def __init__(self, uses: int) -> None:
        self._marks = array("q", bytes(8 * (uses + 1)))
        self._last: dict[OffloadKey, int] = {}
        self._used = 0

    def depth(self, key: OffloadKey) -> int | None:
        """Count the keys used since a key's last use, including the key; ``None`` for a new key."""
        place = self._last.get(key)
        if place is None:
            return None
        newer = len(self._last) + 1
        while place:
            newer -= self._marks[place]
            place &= place - 1
        return newer

    def use(self, key: OffloadKey) -> None:
        last = self._last.get(key)
        if last is not None:
            self._add(last, -1)
        self._used += 1
        self._last[key] = self._used
        self._add(self._used, 1)

    def _add(self, place: int, count: int) -> None:
        marks = self._marks
        while place < len(marks):
            marks[place] += count
            place += place & -place


def _play_share(
    workload: Sequence[ReplayRequest],
    policy: str,
    exact: Mapping[int, int],
    parts: int,
    part: int,
    advance: Advance,
) -> dict[int, int]:
    """Estimate a policy's hits at each size from a share of the keys, in pools of that share."""
    # Most of the error comes from the few keys that nearly every request names. ``lru`` has the
    # same error, but its exact hits are known, so only the policy's gain over ``lru`` is scaled up.
    first = part * _HASHES // parts
    hashes = range(first, first + _HASHES // parts)
    sample = [
        dataclasses.replace(of, keys=tuple(key for key in of.keys if crc32(key) in hashes))
        for of in workload
    ]
    make, make_lru = load_policy(policy), load_policy(_LRU)
    hits = {}
    for slots, true in exact.items():
        fewer = max(1, slots // parts)
        gain = count_hits(sample, make(), fewer) - count_hits(sample, make_lru(), fewer)
        hits[slots] = max(0, true + parts * gain)
        advance(1)
    return hits


def count_hits(workload: Sequence[ReplayRequest], policy: EvictionPolicy, slots: int) -> int:
    """Count the hits of a simulated host pool that has no tiers behind it."""
    policy.open(slots)
    primary = PrimaryTier(slots, 1, policy)
    by_key = primary.by_key
    hit_chunks = 0
    for request in workload:
        primary.now_s = policy.now_s = request.arrived_s
        hits = list(takewhile(by_key.__contains__, request.keys))
        hit_chunks += len(hits)
        for key in hits:
            by_key[key].hit_step = primary.step
        # The request computes and offers again the chunks that are present after the first miss.
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
    return hit_chunks
