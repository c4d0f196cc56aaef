"""Hit rates of the eviction policies, beside the offline optimum.

Usage: python benchmarks/policies.py [--trace FILE] [--slots N ...] [--requests N] [--seed N]

Of a block-hash trace the second half is counted, so that no policy gains from having been tuned on
the first, and none is still learning; the pool is as the first half leaves it. Without a trace,
generated workloads are played, each the hard case of some policy. The optimum knows the future: it
evicts the chunk that is used last, or never again.

Counted is what ``kvtier replay`` hits without tiers, one request at a time; the figures are the
same in each run. The column of the file tier is a pool that evicts as a file root does which is as
large; a reference comes each tenth of a second.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import results
from results import Series
from support.workloads import WORKLOADS, generate

from kvtier_file.chunks import USE_NS, next_use_ns
from kvtier_file.recency import RecencyIndex
from kvtier_sdk import EvictionPolicy, OffloadKey, RequestContext, load_policy
from kvtier_sdk.replay import ReplayRequest, read_trace
from kvtier_sdk.replay.sweep import count_hits

_POLICIES = ("fifo", "lru", "arc", "prefix")


def main() -> None:
    """Print a line for each workload and size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="block-hash trace; default: generated workloads")
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[2000, 5000, 10000, 20000], help="with --trace"
    )
    parser.add_argument("--requests", type=int, default=4000, help="of a generated workload")
    parser.add_argument("--seed", type=int, default=1, help="of a generated workload")
    results.add_option(parser)
    arguments = parser.parse_args()
    measured: list[Series] = []
    heads = [*_POLICIES, "file tier", "optimum", "prefix/lru", "prefix/arc", "file/lru"]
    print(f"{'':20} {'slots':>6}" + "".join(f"{head:>12}" for head in heads))
    if arguments.trace is not None:
        workload = read_trace(arguments.trace)
        for slots in arguments.slots:
            measured += _print_row("trace, second half", workload, slots, len(workload) // 2)
        results.write(arguments.json, measured)
        return
    for name, sizes in WORKLOADS.items():
        workload = generate(name, arguments.requests, arguments.seed)
        for slots in sizes:
            measured += _print_row(name, workload, slots, 0)
    results.write(arguments.json, measured)


def _print_row(
    name: str, workload: Sequence[ReplayRequest], slots: int, first: int
) -> list[Series]:
    chunks = sum(len(request.keys) for request in workload[first:])

    def rate(make: Callable[[], EvictionPolicy]) -> float:
        hits = count_hits(workload, make(), slots) - count_hits(workload[:first], make(), slots)
        return hits / chunks

    rates = {policy: rate(load_policy(policy)) for policy in _POLICIES}
    rates["file tier"] = rate(_FileTier)
    rates["optimum"] = rate(lambda: _Optimum(workload))
    cells = [f"{value:12.4f}" for value in rates.values()]
    cells += (
        f"{rates[one] / rates[other]:12.3f}" if rates[other] else f"{'-':>12}"
        for one, other in (("prefix", "lru"), ("prefix", "arc"), ("file tier", "lru"))
    )
    print(f"{name:20} {slots:6}" + "".join(cells), flush=True)
    case = f"{slots:,} slots"
    return [
        Series(name, case, policy, "hit rate", "%", [100 * value])
        for policy, value in rates.items()
    ]


class _FileTier(EvictionPolicy):
    """Evicts as a file root with a capacity does."""

    uses_prefix = False
    _REFERENCE_NS = 100_000_000

    def __init__(self) -> None:
        self._index = RecencyIndex()
        self._used_ns: dict[OffloadKey, int] = {}
        self._now_ns = USE_NS

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        self._use(key, self._now_ns)

    def on_access(self, key: OffloadKey) -> None:
        self._use(key, next_use_ns(self._used_ns[key], self._now_ns))

    def on_remove(self, key: OffloadKey) -> None:
        del self._used_ns[key]
        self._index.discard(key)

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        victims = []
        passed = []
        while len(victims) < count and (found := self._index.stalest(self._now_ns)):
            _, use = found
            passed.append(use)
            self._index.discard(use[1])
            if is_evictable(use[1]):
                victims.append(use[1])
        for use in passed:
            self._index.put(use)
        return victims

    def _use(self, key: OffloadKey, used_ns: int) -> None:
        self._used_ns[key] = used_ns
        self._index.put((used_ns, key, 1))
        self._now_ns += self._REFERENCE_NS


class _Optimum(EvictionPolicy):
    """Evicts the chunk that is used last, or never again.

    After L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.

    Args:
        workload: the future.
    """

    uses_prefix = False

    def __init__(self, workload: Sequence[ReplayRequest]) -> None:
        self._uses: dict[OffloadKey, list[int]] = defaultdict(list)
        for number in range(len(workload) - 1, -1, -1):
            for key in dict.fromkeys(workload[number].keys):
                self._uses[key].append(number)
        # Of each resident chunk, the request that uses it next.
        self._next: dict[OffloadKey, float] = {}
        # The same, the last first; with entries that are out of date. Of chunks that one request
        # uses, the one that was noted first: it is the last in the prefix.
        self._order: list[tuple[float, int, OffloadKey]] = []
        self._noted = 0

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        self.on_access(key)

    def on_access(self, key: OffloadKey) -> None:
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
