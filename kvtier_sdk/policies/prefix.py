"""An eviction policy by recency and number of uses. Simulations choose the weight of the uses.

Each weight is simulated on a sample of the chunks, as in C. Waldspurger et al., "Cache Modeling and
Optimization using Miniature Simulations", USENIX ATC 2017.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from math import inf, log2
from zlib import crc32

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.types import OffloadKey, RequestContext

# Each class of chunks begins at one of these numbers of uses. More than 16 uses count as 16.
_CLASSES = (1, 2, 3, 4, 6, 8, 12, 16)
_MOST_USES = _CLASSES[-1]
_CLASS_OF = tuple(sum(uses >= least for least in _CLASSES) - 1 for uses in range(_MOST_USES + 1))
# The simulated weights. If several weights have the most hits, the policy uses the first of them.
_WEIGHTS = (0.25, 0.5, 0.0, 1.0, 2.0, 4.0, 8.0)
# The fewest keys to remember: evicted keys per slot, and sampled keys per simulated slot.
_GHOSTS = 3
_SAMPLED_HISTORY = 8
# One chunk in 16 is sampled, and more in a small pool, so that each simulation has enough slots.
_MOST_SPARSE = 16
_LEAST_SAMPLED_SLOTS = 128
# After this many inserts and uses per slot, earlier simulated hits count half.
_HALF_LIFE = 6
_BUCKETS = 64
_CLASS_BITS = 3
_CLASS_MASK = (1 << _CLASS_BITS) - 1

_Queue = OrderedDict[OffloadKey, int]


class PrefixPolicy(EvictionPolicy):
    """A policy that evicts the chunk with the least worth.

    The worth of a chunk is the time of its last use plus a bonus for its number of uses. Time is
    counted in references: each insert and each use is one reference. Doubling a chunk's uses adds
    ``weight * slots`` references to the bonus. The policy also remembers the number of uses of
    evicted chunks, for at least three chunks per slot.

    The best weight depends on the workload. Weight 0 evicts the least recently used chunk. Weights
    4 and 8 have twice as many hits as weight 0 if conversations pause for longer than a chunk stays
    in the pool. So each weight is simulated with a sample of the chunks, and the policy uses the
    weight with the most hits. Older hits count less.

    An engine uses a chunk together with all earlier chunks of the prefix, and the use of the last
    chunk is recorded first. So a chunk has an older last use than the chunks before it, and at
    most as many uses, and is evicted before them.
    """

    # Parents are not needed, because the calls come in the reverse order of the prefix.
    uses_prefix = False

    def __init__(self) -> None:
        self._slots = 0
        self._now = 0
        self._uses: dict[OffloadKey, int] = {}
        # For each class, the time of each chunk's last use, oldest first.
        self._queues: list[_Queue] = [OrderedDict() for _ in _CLASSES]
        self._queue_of = [self._queues[of] for of in _CLASS_OF]
        # The number of uses of evicted chunks, by a hash of the key. The older generation is
        # forgotten at once, because forgetting chunks one by one would sometimes block the thread.
        self._ghosts: dict[int, int] = {}
        self._older_ghosts: dict[int, int] = {}
        self._most_ghosts = 0
        self._one_in = 1
        self._simulations = _Simulations(1, 1)
        self._bonuses = self._simulations.bonuses

    def open(self, slots: int) -> None:
        self._slots = slots
        self._most_ghosts = _GHOSTS * slots
        self._one_in = max(1, min(_MOST_SPARSE, slots // _LEAST_SAMPLED_SLOTS))
        self._simulations = _Simulations(slots, self._one_in)
        self._bonuses = self._simulations.bonuses

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        if not self._slots:
            raise KVTierError(
                "policy prefix: open() was not called, so it does not know the capacity"
            )
        ghost = hash(key)
        uses = self._ghosts.get(ghost) or self._older_ghosts.get(ghost, 0)
        if uses < _MOST_USES:
            uses += 1
        self._now += 1
        self._uses[key] = uses
        self._queue_of[uses][key] = self._now
        if not crc32(key) % self._one_in:
            self._bonuses = self._simulations.use(key, self._now, _CLASS_OF[uses])

    def on_access(self, key: OffloadKey) -> None:
        uses = self._uses[key]
        queue = self._queue_of[uses]
        if uses < _MOST_USES:
            uses += 1
            self._uses[key] = uses
        self._now += 1
        if self._queue_of[uses] is queue:
            queue.move_to_end(key)
        else:
            del queue[key]
            queue = self._queue_of[uses]
        queue[key] = self._now
        if not crc32(key) % self._one_in:
            self._bonuses = self._simulations.use(key, self._now, _CLASS_OF[uses])

    def on_remove(self, key: OffloadKey) -> None:
        uses = self._uses.pop(key)
        del self._queue_of[uses][key]
        self._ghosts[hash(key)] = uses
        if len(self._ghosts) >= self._most_ghosts:
            self._older_ghosts, self._ghosts = self._ghosts, {}

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        if not self._uses:
            return []
        bonuses = self._bonuses
        walks = [iter(queue.items()) for queue in self._queues]
        # The oldest chunk of each class, ordered by worth.
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


class _Simulations:
    """A simulated pool for each weight, to find the weight with the most hits."""

    def __init__(self, slots: int, one_in: int) -> None:
        # References within one bucket count as simultaneous.
        self._bucket = max(1, slots // _BUCKETS)
        turn = slots / self._bucket
        self._bonuses = [
            tuple(round(weight * slots * log2(least)) for least in _CLASSES) for weight in _WEIGHTS
        ]
        self._pools = [
            _Simulation([round(weight * turn * log2(least)) for least in _CLASSES], slots / one_in)
            for weight in _WEIGHTS
        ]
        # The bonus of each class under the chosen weight, in references.
        self.bonuses = self._bonuses[0]
        # The bucket and class of each sampled chunk's last use, as one number, in two generations.
        self._last: dict[OffloadKey, int] = {}
        self._older: dict[OffloadKey, int] = {}
        self._most_last = max(1, _SAMPLED_HISTORY * slots // one_in)
        self._half_life = _HALF_LIFE * slots
        self._halving_at = self._half_life

    def use(self, key: OffloadKey, now: int, of: int) -> tuple[int, ...]:
        """Record a use of a sampled chunk; return each class's bonus under the best weight."""
        last = self._last.get(key, -1)
        if last < 0:
            last = self._older.get(key, -1)
        bucket = now // self._bucket
        self._last[key] = bucket << _CLASS_BITS | of
        if len(self._last) >= self._most_last:
            self._older, self._last = self._last, {}
        last_bucket, last_of = last >> _CLASS_BITS, last & _CLASS_MASK
        for pool in self._pools:
            pool.use(last_bucket, last_of, bucket, of)
        if now >= self._halving_at:
            self._halving_at = now + self._half_life
            for pool in self._pools:
                pool.hits /= 2
        hits = [pool.hits for pool in self._pools]
        self.bonuses = self._bonuses[hits.index(max(hits))]
        return self.bonuses


class _Simulation:
    """A simulated pool with one weight. It counts the chunks of each worth, and stores no keys.

    A chunk's worth changes only when the chunk is used. So the pool holds exactly the chunks whose
    worth is at least a floor, and the floor only rises. Older ``hits`` count less.
    """

    __slots__ = ("_bonuses", "_chunks", "_counts", "_floor", "_slots", "hits")

    def __init__(self, bonuses: list[int], slots: float) -> None:
        self.hits = 0.0
        self._bonuses = bonuses
        self._slots = slots
        self._counts: dict[int, int] = {}
        self._chunks = 0
        self._floor = 0

    def use(self, last: int, last_of: int, now: int, of: int) -> None:
        counts = self._counts
        if last >= 0:
            worth = last + self._bonuses[last_of]
            if worth >= self._floor:
                self.hits += 1
                counts[worth] -= 1
                self._chunks -= 1
        worth = now + self._bonuses[of]
        if worth >= self._floor:
            counts[worth] = counts.get(worth, 0) + 1
            self._chunks += 1
            while self._chunks > self._slots:
                self._chunks -= counts.pop(self._floor, 0)
                self._floor += 1
