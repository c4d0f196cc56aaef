"""Measure the hit rates of the eviction policies and of the offline optimum.

Usage: python benchmarks/policies.py [--trace FILE [--told]] [--slots N ...] [--seed N]

Only the second half of a block-hash trace is counted. The first half fills the pool, lets policies
learn, and may have been used to tune the policies. Without a trace, the benchmark plays generated
workloads, each difficult for some policy. The optimum knows the future, and evicts the chunk whose
next use is farthest away.

--told needs a trace with sessions, and counts all of the trace. Four runs of the default policy get
different hints: none, the reasons why answers end, and these reasons with either rough or exact
times of the sessions' next turns.

Requests are played one at a time, and hits are counted as in ``kvtier replay`` without tiers. Every
run produces the same figures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import nlargest
from math import inf
from pathlib import Path

from results import Series
from runner import Benchmark, positive
from support.workloads import WORKLOADS, count_hits, generate

from kvtier_sdk import EvictionPolicy, OffloadKey, RequestContext, load_policy
from kvtier_sdk.cli.replay import ReplayRequest, read_trace
from kvtier_sdk.cli.replay.workload import told

_Workload = Sequence[ReplayRequest]
_Play = tuple[str, _Workload, Callable[[], EvictionPolicy]]
_POLICIES = ("returns", "lru", "arc")


def main() -> None:
    bench = Benchmark(__doc__)
    bench.option("--trace", type=Path, help="block-hash trace; default: generated workloads")
    bench.option("--told", action="store_true", help="with --trace: what callers' hints bring")
    bench.option("--slots", type=positive, nargs="+", help="with --trace")
    bench.option("--requests", type=positive, default=4000, help="of a generated workload")
    bench.option("--seed", type=int, default=1, help="of a generated workload")
    options = bench.parse()
    if options.trace is None:
        for name, sizes in WORKLOADS.items():
            workload = generate(name, options.requests, options.seed)
            for slots in sizes:
                bench.add(_rates(name, slots, 0, _policies(workload)), "returns")
    elif options.told:
        workload = read_trace(options.trace)
        for slots in options.slots or (2048, 4096, 6144):
            bench.add(_rates("told", slots, 0, _told(workload, options.seed)), "nothing")
    else:
        workload = read_trace(options.trace)
        for slots in options.slots or (2000, 5000, 10000, 20000):
            half = len(workload) // 2
            bench.add(_rates("trace, second half", slots, half, _policies(workload)), "returns")
    bench.finish()


def _policies(workload: _Workload) -> Iterator[_Play]:
    for policy in _POLICIES:
        yield policy, workload, load_policy(policy)
    yield "optimum", workload, partial(_Optimum, workload)


def _told(workload: _Workload, seed: int) -> Iterator[_Play]:
    silent = [replace(request, stop=None) for request in workload]
    yield "lru", silent, load_policy("lru")
    returns = load_policy("returns")
    yield "nothing", silent, returns
    yield "why answers end", workload, returns
    yield "rough times", told(workload, 1.0, seed), returns
    yield "exact times", told(workload, 0.0, seed), returns
    yield "optimum", workload, partial(_Optimum, workload)


def _rates(name: str, slots: int, first: int, plays: Iterator[_Play]) -> Sequence[Series]:
    rates = []
    for way, workload, make in plays:
        chunks = sum(len(request.keys) for request in workload[first:])
        hits = count_hits(workload, make(), slots) - count_hits(workload[:first], make(), slots)
        rate = [100 * hits / chunks]
        rates.append(Series(name, f"{slots:,} slots", way, "hit rate", "%", rate))
    return rates


class _Optimum(EvictionPolicy):
    """A policy that evicts the chunk whose next use is farthest in the future.

    Source: L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """

    def __init__(self, workload: _Workload) -> None:
        self._uses: dict[OffloadKey, list[int]] = defaultdict(list)
        for number in range(len(workload) - 1, -1, -1):
            for key in dict.fromkeys(workload[number].keys):
                self._uses[key].append(number)
        # For each resident chunk, the number of the next request with this chunk. If chunks have
        # the same next request, the second number decides: the end of a prefix is evicted first.
        self._next: dict[OffloadKey, tuple[float, int]] = {}
        self._noted = 0

    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        self.on_access(keys, request)

    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        for key in reversed(keys):
            uses = self._uses[key]
            uses.pop()
            self._noted += 1
            self._next[key] = (uses[-1] if uses else inf, -self._noted)

    def on_remove(self, key: OffloadKey) -> None:
        del self._next[key]

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        return nlargest(count, filter(is_evictable, self._next), key=self._next.__getitem__)


if __name__ == "__main__":
    main()
