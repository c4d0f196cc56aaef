"""Recency and uses of a prefix's chunks, weighed against each other by simulations in miniature.

The weight is found as in C. Waldspurger et al., "Cache Modeling and Optimization using Miniature
Simulations", USENIX ATC 2017: each candidate is simulated on a sample of the chunks.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf, log2
from zlib import crc32

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.types import OffloadKey, RequestContext

# The least uses of each class of chunks; uses beyond the last are not counted.
_CLASSES = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_USES = _CLASSES[-1]
_CLASS_OF = tuple(sum(uses >= least for least in _CLASSES) - 1 for uses in range(_MOST_USES + 1))
# Candidates. Of those that hit equally often, the first is used.
_WEIGHTS = (0.25, 0.5, 0.0, 1.0, 2.0, 4.0, 8.0)
# Bounds of memory, as multiples of the slots.
_GHOSTS = 4
_SAMPLED_HISTORY = 16
# One chunk in so many is sampled, fewer in a small pool, so that a simulation has some slots.
_MOST_SPARSE = 16
_LEAST_SAMPLED_SLOTS = 128
# References, as a multiple of the slots, after which the simulations' hits count half.
_HALF_LIFE = 6
_BUCKETS = 64


class PrefixPolicy(EvictionPolicy):
    """Evicts the chunk with the least worth: its last use, plus a bonus for its earlier uses.

    Time is the number of references: each insert and each use is one. A doubling of a chunk's uses
    is worth as much as ``weight`` turns of the pool, that is ``weight * slots`` references. Uses
    are remembered beyond eviction, for four evicted chunks a slot.

    Which weight is right depends on the workload: 0 is the least recently used chunk, and where
    conversations pause for longer than the pool lasts, 4 and 8 hit twice as often. Each candidate
    is simulated with a sample of the chunks, and the one with the most hits lately decides.

    A chunk is used together with those before it in its prefix, and the last of them is noted
    first. So it has no more uses than they have, it is older, and it leaves before them.
    """

    # The order of the calls says as much as parents and positions would.
    uses_prefix = False

    def __init__(self) -> None:
        self._slots = 0
        self._now = 0
        self._uses: dict[OffloadKey, int] = {}
        # By class, the time of each chunk's last use, oldest first.
        self._queues: list[OrderedDict[OffloadKey, int]] = [OrderedDict() for _ in _CLASSES]
        # By a hash of the key, the uses of an evicted chunk.
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._most_ghosts = 0
        self._one_in = 1
        # Of sampled chunks, resident or not: time and class of the last use.
        self._sampled: OrderedDict[OffloadKey, tuple[int, int]] = OrderedDict()
        self._simulations: list[_Simulation] = []
        self._halving_at = 0

    def open(self, slots: int) -> None:
        self._slots = slots
        self._most_ghosts = _GHOSTS * slots
        self._one_in = max(1, min(_MOST_SPARSE, slots // _LEAST_SAMPLED_SLOTS))
        self._simulations = [_Simulation(weight, slots, self._one_in) for weight in _WEIGHTS]
        self._halving_at = _HALF_LIFE * slots

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        if not self._slots:
            raise KVTierError(
                "policy prefix: open() was not called, so it does not know the capacity"
            )
        self._note(key, self._ghosts.pop(hash(key), 0))

    def on_access(self, key: OffloadKey) -> None:
        uses = self._uses[key]
        del self._queues[_CLASS_OF[uses]][key]
        self._note(key, uses)

    def on_remove(self, key: OffloadKey) -> None:
        uses = self._uses.pop(key)
        del self._queues[_CLASS_OF[uses]][key]
        ghosts = self._ghosts
        ghosts[hash(key)] = uses
        if len(ghosts) > self._most_ghosts:
            ghosts.popitem(last=False)

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        if not self._uses:
            return []
        bonuses = max(self._simulations, key=_hits_of).bonuses
        walks = [iter(queue.items()) for queue in self._queues]
        # The next chunk of each class, by its worth.
        fronts = [
            (used + bonuses[of], of, key)
            for of, walk in enumerate(walks)
            for key, used in [next(walk, (b"", -1))]
            if used >= 0
        ]
        heapify(fronts)
        victims: list[OffloadKey] = []
        while fronts and len(victims) < count:
            _, of, key = heappop(fronts)
            if is_evictable(key):
                victims.append(key)
            bonus = bonuses[of]
            least_of_others = fronts[0][0] if fronts else inf
            for key, used in walks[of]:
                if used + bonus > least_of_others or len(victims) == count:
                    heappush(fronts, (used + bonus, of, key))
                    break
                if is_evictable(key):
                    victims.append(key)
        return victims

    def _note(self, key: OffloadKey, earlier_uses: int) -> None:
        """Put a chunk to the end of the queue of its class."""
        uses = earlier_uses + 1 if earlier_uses < _MOST_USES else _MOST_USES
        self._now += 1
        self._uses[key] = uses
        self._queues[_CLASS_OF[uses]][key] = self._now
        if not crc32(key) % self._one_in:
            self._simulate(key, _CLASS_OF[uses])

    def _simulate(self, key: OffloadKey, of: int) -> None:
        """Tell all simulations of a use of a sampled chunk that is in class ``of`` now."""
        sampled, now = self._sampled, self._now
        last = sampled.pop(key, None)
        sampled[key] = now, of
        if len(sampled) > _SAMPLED_HISTORY * self._slots // self._one_in:
            sampled.popitem(last=False)
        for simulation in self._simulations:
            simulation.use(last, now, of)
        if now >= self._halving_at:
            self._halving_at = now + _HALF_LIFE * self._slots
            for simulation in self._simulations:
                simulation.hits /= 2


class _Simulation:
    """A pool in miniature with one weight: the number of its chunks by worth, without their keys.

    A chunk's worth changes with its uses only, which do not depend on the weight. So the pool holds
    the chunks whose worth is above a floor, and the floor never falls.

    Attributes:
        bonuses: by class, what the earlier uses are worth, in references.
        hits: uses of chunks that it held, the older ones for less.

    Args:
        weight: what a doubling of the uses is worth, in turns of the pool.
        slots: of the real pool.
        one_in: one chunk in so many is simulated.
    """

    __slots__ = ("_bucket", "_chunks", "_counts", "_floor", "_slots", "bonuses", "hits")

    def __init__(self, weight: float, slots: int, one_in: int) -> None:
        self.bonuses = tuple(weight * slots * log2(least) for least in _CLASSES)
        self.hits = 0.0
        self._slots = slots / one_in
        # References whose worth counts as the same.
        self._bucket = max(1.0, slots / _BUCKETS)
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._chunks = 0
        self._floor = 0

    def use(self, last: tuple[int, int] | None, now: int, of: int) -> None:
        """Take a use of a chunk.

        Args:
            last: time and class of its last use, where it is known.
            now: the time.
            of: its class from now on.
        """
        counts = self._counts
        if last is not None:
            worth = int((last[0] + self.bonuses[last[1]]) / self._bucket)
            if worth >= self._floor:
                self.hits += 1
                counts[worth] -= 1
                self._chunks -= 1
        worth = int((now + self.bonuses[of]) / self._bucket)
        if worth >= self._floor:
            counts[worth] += 1
            self._chunks += 1
            while self._chunks > self._slots:
                self._chunks -= counts.pop(self._floor, 0)
                self._floor += 1


def _hits_of(simulation: _Simulation) -> float:
    return simulation.hits
