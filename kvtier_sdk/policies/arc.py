"""The eviction policy ARC, which learns the weights of recency and frequency.

After N. Megiddo and D. S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.types import OffloadKey, RequestContext

_Order = OrderedDict[OffloadKey, None]


class ARCPolicy(EvictionPolicy):
    """Balances recency (list T1) against frequency (list T2); B1 and B2 remember evicted keys.

    Chunks are evicted from T1 if T1 is longer than its target, and from T2 otherwise. If B1 has a
    new chunk's key, T1 was too small, so T1's target grows. If B2 has the key, the target shrinks.

    If T1 is exactly as long as its target, the paper's choice depends on the new chunk. This policy
    does not know the new chunk yet, so it evicts from T2. A promoted chunk is inserted and then
    used, so it moves to T2. This is correct, because the chunk was first seen when it was stored.
    """

    def __init__(self) -> None:
        self._slots = 0
        self._once: _Order = OrderedDict()  # T1: seen once recently, least recent first
        self._again: _Order = OrderedDict()  # T2: seen at least twice
        self._once_ghosts: _Order = OrderedDict()  # B1: evicted from T1
        self._again_ghosts: _Order = OrderedDict()  # B2: evicted from T2
        self._target = 0.0  # the paper's p: the number of slots that T1 should have

    def open(self, slots: int) -> None:
        self._slots = slots

    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        if not self._slots:
            raise KVTierError("policy arc: open() was not called, so it does not know the capacity")
        for key in reversed(keys):
            self._insert(key)

    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        for key in reversed(keys):
            if key in self._again:
                self._again.move_to_end(key)
            else:
                del self._once[key]
                self._again[key] = None

    def on_remove(self, key: OffloadKey) -> None:
        if key in self._again:
            del self._again[key]
            self._again_ghosts[key] = None
        else:
            del self._once[key]
            self._once_ghosts[key] = None

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        once, again = filter(is_evictable, self._once), filter(is_evictable, self._again)
        victims: list[OffloadKey] = []
        left_once = len(self._once)
        while len(victims) < count:
            over = left_once > self._target
            victim = next(once if over else again, None)
            if victim is None:
                # This list has no more victims, so take the remaining victims from the other list.
                victims += islice(again if over else once, count - len(victims))
                break
            left_once -= over
            victims.append(victim)
        return victims

    def _insert(self, key: OffloadKey) -> None:
        # A hit in the shorter of B1 and B2 moves the target further.
        once, again = len(self._once_ghosts), len(self._again_ghosts)
        if key in self._once_ghosts:
            self._target = min(float(self._slots), self._target + max(1.0, again / once))
            del self._once_ghosts[key]
            self._again[key] = None
        elif key in self._again_ghosts:
            self._target = max(0.0, self._target - max(1.0, once / again))
            del self._again_ghosts[key]
            self._again[key] = None
        else:
            self._once[key] = None
            self._forget_ghosts()

    def _forget_ghosts(self) -> None:
        """Limit T1 and B1 together to the number of slots, and all four lists to twice as many."""
        known_once = len(self._once) + len(self._once_ghosts)
        if known_once > self._slots:
            self._once_ghosts.popitem(last=False)
            known_once -= 1
        if known_once + len(self._again) + len(self._again_ghosts) > 2 * self._slots:
            self._again_ghosts.popitem(last=False)
