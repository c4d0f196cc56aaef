"""Admission by reuse: a tier that evicts chunks unread is given only those seen before."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from zlib import crc32

from kvtier_sdk.metrics import TierStats
from kvtier_sdk.tiering.slots import Slot
from kvtier_sdk.types import OffloadKey

_HASHES = 2**32
# Chunks of the tier that are followed; of a larger tier a share, chosen by a hash of the key.
_MOST_FOLLOWED = 1024
# A key is remembered until so many times the tier's chunks were seen after it.
_MEMORY = 8
_MIN_PERIOD = 64
# Of a large tier no more keys are remembered than twice as many.
_MOST_SEEN = 2**17


class Admission:
    """Decides whether a tier is given chunks that were never seen before.

    Once the tier evicts, two small models of it compete on a sample of the keys: a cache that is
    given every chunk, and one that is given a chunk when it is seen for the second time. Each is as
    large as the tier, scaled to the sample, and evicts the least recently used. While the second
    has at least as many hits, the tier gets only chunks that were seen before. A chunk that is
    refused may be offered again when it is used.

    A tier that does not report evictions is given every chunk. Nothing here grows with the tier.

    Attributes:
        is_selective: true while the tier gets only chunks that were seen before.

    Args:
        stats: the tier's counters.
        enabled: false to count only.
    """

    def __init__(self, stats: TierStats, *, enabled: bool) -> None:
        self.is_selective = False
        self._stats = stats
        self._enabled = enabled
        # A key is followed if its hash is below this.
        self._limit = _HASHES
        # Followed chunks that the tier has; true once read.
        self._was_read: dict[OffloadKey, bool] = {}
        # How many of them there were when the tier last evicted; 0 until then.
        self._capacity = 0
        self._all = _Cache()
        self._reused = _Cache()
        self._seen_once = _Cache()
        self._period = 0
        # Hashes of the keys seen lately, in two generations: the elder is dropped as a whole, so
        # that the chunks of a prefix are forgotten together.
        self._seen: set[int] = set()
        self._seen_earlier: set[int] = set()

    def choose(self, slots: Sequence[Slot]) -> Sequence[Slot]:
        """Take computed chunks, and choose those that the tier gets.

        Args:
            slots: their slots.

        Returns:
            All of them, or those that were seen before. The others are counted.
        """
        if not self._capacity:
            return slots
        chosen = [slot for slot in slots if self._note(slot.key) or not self.is_selective]
        self._stats.not_admitted_chunks += len(slots) - len(chosen)
        return chosen

    def sent(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks that the tier is given."""
        for key in keys:
            if crc32(key) < self._limit:
                self._was_read.setdefault(key, False)
        while len(self._was_read) > _MOST_FOLLOWED:
            self._follow_fewer()

    def failed(self, key: OffloadKey) -> None:
        """Take a chunk whose store failed."""
        self._was_read.pop(key, None)

    def read(self, key: OffloadKey) -> None:
        """Take a chunk that was read from the tier."""
        if key in self._was_read:
            self._was_read[key] = True

    def used(self, slots: Iterable[Slot], is_hit: Iterable[bool]) -> None:
        """Take chunks that a request uses.

        Args:
            slots: their slots.
            is_hit: for each, true if the request got it from this tier.
        """
        if self._capacity:
            for slot, hit in zip(slots, is_hit, strict=True):
                self._note(slot.key, is_hit=hit)

    def removed(self, keys: Iterable[OffloadKey]) -> None:
        """Take chunks that the tier no longer has."""
        followed = len(self._was_read)
        unread = [self._was_read.pop(key, None) for key in keys].count(False)
        self._stats.evicted_unread_chunks += unread * (_HASHES // self._limit)
        if self._enabled and len(self._was_read) < followed:
            self._capacity = followed

    def _note(self, key: OffloadKey, *, is_hit: bool = True) -> bool:
        """Note a use; returns true if the key was seen before."""
        hashed = crc32(key)
        if hashed < self._limit:
            self._compete(key, is_hit)
        was_seen = hashed in self._seen or hashed in self._seen_earlier
        self._seen.add(hashed)
        chunks = self._capacity * (_HASHES // self._limit)
        if len(self._seen) >= min(_MEMORY * chunks // 2, _MOST_SEEN):
            self._seen_earlier, self._seen = self._seen, set()
        return was_seen

    def _compete(self, key: OffloadKey, is_hit: bool) -> None:
        capacity = self._capacity
        if not self._all.use(key, is_hit):
            self._all.add(key, capacity)
        if not self._reused.use(key, is_hit):
            if self._seen_once.discard(key):
                self._reused.add(key, capacity)
            else:
                self._seen_once.add(key, _MEMORY * capacity)
        self._period += 1
        if self._period >= max(_MIN_PERIOD, capacity):
            self._period = 0
            self.is_selective = self._reused.hits >= self._all.hits
            self._all.hits /= 2
            self._reused.hits /= 2

    def _follow_fewer(self) -> None:
        self._limit //= 2
        self._capacity //= 2
        for keys in (self._was_read, self._all.keys, self._reused.keys, self._seen_once.keys):
            for key in [key for key in keys if crc32(key) >= self._limit]:
                del keys[key]


class _Cache:
    """A model of a cache: its keys, least recently used first, and its hits."""

    __slots__ = ("hits", "keys")

    def __init__(self) -> None:
        self.keys: OrderedDict[OffloadKey, None] = OrderedDict()
        self.hits = 0.0

    def use(self, key: OffloadKey, is_hit: bool) -> bool:
        if key not in self.keys:
            return False
        self.keys.move_to_end(key)
        self.hits += is_hit
        return True

    def add(self, key: OffloadKey, capacity: int) -> None:
        self.keys[key] = None
        while len(self.keys) > capacity:
            self.keys.popitem(last=False)

    def discard(self, key: OffloadKey) -> bool:
        if key not in self.keys:
            return False
        del self.keys[key]
        return True
