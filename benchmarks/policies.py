"""Measure the hit rates of the eviction policies and of the offline optimum.

Usage: python benchmarks/policies.py [--trace FILE] [--slots N ...] [--requests N] [--seed N]

Only the second half of a block-hash trace is counted. The first half fills the pool, lets policies
learn, and may have been used to tune the policies. Without a trace, generated workloads are played,
each of which is difficult for some policy. The optimum knows the future, and evicts the chunk whose
next use is farthest away.

Hits are counted as ``kvtier replay`` counts them without tiers, one request at a time. Each run
gives the same figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from math import inf
from pathlib import Path

from results import Series
from runner import Benchmark, positive
from support.workloads import WORKLOADS, generate

from kvtier_sdk import EvictionPolicy, OffloadKey, RequestContext, load_policy
from kvtier_sdk.cli.replay import ReplayRequest, read_trace
from kvtier_sdk.cli.replay.sweep import count_hits

_POLICIES = ("returns", "lru", "arc")


def main() -> None:
    bench = Benchmark(__doc__)
    bench.option("--trace", type=Path, help="block-hash trace; default: generated workloads")
    sizes = [2000, 5000, 10000, 20000]
    bench.option("--slots", type=positive, nargs="+", default=sizes, help="with --trace")
    bench.option("--requests", type=positive, default=4000, help="of a generated workload")
    bench.option("--seed", type=int, default=1, help="of a generated workload")
    options = bench.parse()
    if options.trace is not None:
        workload = read_trace(options.trace)
        for slots in options.slots:
            bench.add(_rates("trace, second half", workload, slots, len(workload) // 2), "returns")
    else:
        for name, sizes in WORKLOADS.items():
            workload = generate(name, options.requests, options.seed)
            for slots in sizes:
                bench.add(_rates(name, workload, slots, 0), "returns")
    bench.finish()


def _rates(
    name: str, workload: Sequence[ReplayRequest], slots: int, first: int
) -> Sequence[Series]:
    chunks = sum(len(request.keys) for request in workload[first:])
    makes: dict[str, Callable[[], EvictionPolicy]] = {
        **{policy: load_policy(policy) for policy in _POLICIES},
        "optimum": partial(_Optimum, workload),
    }
    rates = []
    for policy, make in makes.items():
        hits = count_hits(workload, make(), slots) - count_hits(workload[:first], make(), slots)
        rate = [100 * hits / chunks]
        rates.append(Series(name, f"{slots:,} slots", policy, "hit rate", "%", rate))
    return rates


class _Optimum(EvictionPolicy):
    """A policy that evicts the chunk whose next use is farthest in the future.

    Source: L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """

    def __init__(self, workload: Sequence[ReplayRequest]) -> None:
        self._uses: dict[OffloadKey, list[int]] = defaultdict(list)
        for number in range(len(workload) - 1, -1, -1):
            for key in dict.fromkeys(workload[number].keys):
                self._uses[key].append(number)
        # For each resident chunk, the number of the next request that uses the chunk.
        self._next: dict[OffloadKey, float] = {}
        # A heap of these numbers, highest first, with some stale entries. Of chunks with equal
        # numbers, the end of a prefix is evicted first.
        self._order: list[tuple[float, int, OffloadKey]] = []
        self._noted = 0

    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        self.on_access(keys, request)

    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        for key in reversed(keys):
            uses = self._uses[key]
            uses.pop()
            self._next[key] = uses[-1] if uses else inf
            self._noted += 1
            heappush(self._order, (-self._next[key], self._noted, key))

    def on_remove(self, key: OffloadKey) -> None:
        del self._next[key]

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        victims: dict[OffloadKey, None] = {}
        kept = []
        while self._order and len(victims) < count:
            entry = heappop(self._order)
            key = entry[2]
            if self._next.get(key) != -entry[0]:
                continue
            if key not in victims and is_evictable(key):
                victims[key] = None
            kept.append(entry)
        for entry in kept:
            heappush(self._order, entry)
        return list(victims)


if __name__ == "__main__":
    main()
