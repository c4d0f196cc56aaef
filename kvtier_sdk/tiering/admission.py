"""Keeps new chunks out of a full tier while this leads to more hits."""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from zlib import crc32

from kvtier_sdk.metrics import TierStats
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.tiering.records import Slot
from kvtier_sdk.types import OffloadKey

_HASHES = 2**32
_MOST_FOLLOWED = 1024  # chunks per tier; if a tier holds more, their hashes select a sample
_MEMORY = 8  # keys to remember for each chunk that the tier has room for
_MIN_PERIOD = 64
_MOST_SEEN = 2**17  # hashes in each generation of seen keys, to bound the memory for a large tier
# The second model's lead must exceed this many standard deviations of a random lead.
_DEVIATIONS = 2
# Beyond this many hits, the counts are halved, so that recent hits decide.
_MUCH_EVIDENCE = 64
# A full tier has room again once its free bytes exceed its used bytes divided by this number.
_ROOM_SHARE = 16

_Cache = OrderedDict[OffloadKey, None]  # the keys of a model, least recently used first


class Admission:
    """Limits a full tier to chunks that were seen before, if this leads to more hits.

    An eviction starts two LRU models of the tier, which process a sample of the keys. The models'
    capacity is scaled to the sample. The first model caches every chunk. The second model caches
    chunks that are seen again. The limit applies while the second model clearly has more hits.

    A tier is full from an eviction until it removes a chunk for another reason, or clearly has room
    again. If the tier evicted below its capacity, the disk was full, and the room is the disk's
    free space. Otherwise the room is the unused part of the capacity.
    """

    def __init__(self, stats: TierStats, log: TierLog, options: RunnerOptions | None) -> None:
        self._stats = stats
        self._log = log
        self._options = options
        self._limit = _HASHES  # keys with a hash below this limit are followed
        self._was_read: dict[OffloadKey, bool] = {}  # for each followed chunk in the tier
        self._capacity = 0  # followed chunks in the tier after its last eviction; 0 if unknown
        # The tier's used bytes and its disk's free bytes when the tier was last known to be full.
        self._full: tuple[int | None, int | None] | None = None
        self._forget()
        # Hashes of recently seen keys, in two generations. The older one is dropped as a whole, so
        # the chunks of a prefix are forgotten together.
        self._seen: set[int] = set()
        self._seen_earlier: set[int] = set()

    @property
    def _enabled(self) -> bool:
        return self._options is not None and self._options.admission == "auto"

    def choose(self, slots: Sequence[Slot]) -> tuple[Sequence[Slot], Sequence[Slot]]:
        """Return the slots of the admitted chunks, and the slots of the other chunks."""
        if not self._capacity:
            return slots, ()
        self._decide()
        chosen: list[Slot] = []
        others: list[Slot] = []
        for slot in slots:
            is_chosen = self._note(slot.key) or not self._stats.is_selective
            (chosen if is_chosen else others).append(slot)
        self._stats.not_admitted_chunks += len(others)
        return chosen, others

    def sent(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            if crc32(key) < self._limit:
                self._was_read.setdefault(key, False)
        while len(self._was_read) > _MOST_FOLLOWED:
            self._follow_fewer()

    def failed(self, key: OffloadKey) -> None:
        self._was_read.pop(key, None)

    def read(self, key: OffloadKey) -> None:
        if key in self._was_read:
            self._was_read[key] = True

    def used(self, slots: Iterable[Slot], is_hit: Iterable[bool]) -> None:
        """Record a request's use of chunks; ``is_hit`` marks the chunks loaded from this tier."""
        if self._capacity:
            for slot, hit in zip(slots, is_hit, strict=True):
                self._note(slot.key, is_hit=hit)

    def removed(self, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        followed = len(self._was_read)
        unread = [self._was_read.pop(key, None) for key in keys].count(False)
        capacity = len(self._was_read)
        self._full = (self._stats.used_bytes, self._stats.free_bytes) if evicted else None
        if evicted:
            self._stats.evicted_unread_chunks += unread * (_HASHES // self._limit)
            if self._enabled and (capacity < followed or self._capacity):
                # The models have the old capacity, so discard them after a large change.
                if not self._capacity / 2 <= capacity <= self._capacity * 2:
                    self._forget()
                self._capacity = capacity
        self._decide()

    def _forget(self) -> None:
        self._capacity = 0
        self._all: _Cache = OrderedDict()
        self._reused: _Cache = OrderedDict()
        self._seen_once: _Cache = OrderedDict()
        # Hits in exactly one of the models, and the second model's lead in these hits.
        self._single_hits = self._lead = 0.0
        self._has_gain = False
        self._period = 0

    def _decide(self) -> None:
        is_selective = self._enabled and self._has_gain and self._is_full()
        if is_selective != self._stats.is_selective:
            self._stats.is_selective = int(is_selective)
            name = self._stats.name
            message = f"{name}: takes every chunk again"
            if is_selective:
                message = (
                    f"{name}: is full, and takes only chunks that were seen before, since that "
                    "brings more hits; 'admission=off' gives it every chunk"
                )
            self._log.often(logging.INFO, "admission", message)

    def _is_full(self) -> bool:
        used, free = self._stats.used_bytes, self._stats.free_bytes
        if self._full is None or used is None:
            return False
        # Unchanged numbers may date from before the eviction, so the tier may still be full.
        if (used, free) == self._full:
            return True
        least_room = used // _ROOM_SHARE
        limit = (self._stats.capacity_bytes or math.inf) - least_room
        if used < limit:
            used_then, free_then = self._full
            if free is None or free_then is None or (used_then or 0) >= limit:
                return False
            # The tier evicted below its capacity, so the disk was full. Check the disk's room.
            if free > free_then + least_room:
                return False
            free = min(free, free_then)
        self._full = used, free
        return True

    def _note(self, key: OffloadKey, *, is_hit: bool = True) -> bool:
        """Record a key; return true if the key was seen before."""
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
        in_all, in_reused = _use(self._all, key), _use(self._reused, key)
        if is_hit and in_all != in_reused:
            self._single_hits += 1
            self._lead += 1 if in_reused else -1
        if not in_all:
            _add(self._all, key, capacity)
        if not in_reused:
            if key in self._seen_once:
                del self._seen_once[key]
                _add(self._reused, key, capacity)
            else:
                _add(self._seen_once, key, _MEMORY * capacity)
        self._period += 1
        if self._period >= max(_MIN_PERIOD, capacity):
            self._period = 0
            self._has_gain = self._lead > _DEVIATIONS * math.sqrt(self._single_hits)
            if self._single_hits > _MUCH_EVIDENCE:
                self._single_hits /= 2
                self._lead /= 2

    def _follow_fewer(self) -> None:
        self._limit //= 2
        self._capacity //= 2
        for keys in (self._was_read, self._all, self._reused, self._seen_once):
            for key in [key for key in keys if crc32(key) >= self._limit]:
                del keys[key]


def _use(cache: _Cache, key: OffloadKey) -> bool:
    if key not in cache:
        return False
    cache.move_to_end(key)
    return True


def _add(cache: _Cache, key: OffloadKey, capacity: int) -> None:
    cache[key] = None
    while len(cache) > capacity:
        cache.popitem(last=False)
