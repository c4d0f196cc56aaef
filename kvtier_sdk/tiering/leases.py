"""Leases, which keep chunks in the primary tier for a time, regardless of the eviction policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from math import inf

from kvtier_sdk.types import OffloadKey


@dataclass(frozen=True, eq=False)
class Lease:
    """The terms on which the primary tier keeps chunks for a ``tenant``."""

    tenant: str
    owner: str  # the session's name, or the request's id if it names no session
    # Each use of a chunk extends its lease to at least this long after the use; 0.0 disables this.
    renewal_s: float
    # Leased chunks are evicted last, lowest priority first. ``None`` prevents their eviction.
    priority: int | None
    # True for prefetched chunks. The lease ends with the turn that uses them.
    is_prefetch: bool = False


class Leases:
    """The leases of all tenants, which share one budget of chunks.

    A tenant may use all of the budget that other tenants do not use. If another tenant needs its
    equal share of the budget, tenants above their share lose the leases that would end first.

    A chunk has one lease. A new lease replaces the old lease of the same owner, a lease of lower
    priority, or a lease of equal priority that ends earlier.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self.held: dict[OffloadKey, Lease] = {}
        self._until_s: dict[str, dict[OffloadKey, float]] = {}  # by tenant, each lease's end
        # A heap of the leases' ends. It may contain outdated ends of renewed or replaced leases.
        self._ends: list[tuple[float, OffloadKey]] = []

    def grant(self, keys: Iterable[OffloadKey], lease: Lease, until_s: float) -> int:
        """Lease as many leading chunks as fit the budget; return how many now have a lease."""
        keys = list(dict.fromkeys(keys))
        own = self._until_s.setdefault(lease.tenant, {})
        held = self.held
        room = self._make_room(own, keys)
        granted = 0
        for key in keys:
            old = held.get(key)
            if old is None:
                if not room:
                    break
                room -= 1
            elif self._is_better(old, self._until_s[old.tenant][key], lease, until_s):
                granted += 1
                continue
            else:
                del self._until_s[old.tenant][key]
            held[key] = lease
            own[key] = until_s
            heappush(self._ends, (until_s, key))
            granted += 1
        for tenant in [tenant for tenant, held_s in self._until_s.items() if not held_s]:
            del self._until_s[tenant]
        return granted

    def renew(self, keys: Iterable[OffloadKey], now_s: float) -> None:
        for key in keys:
            lease = self.held.get(key)
            if lease is not None and lease.renewal_s:
                until_s = self._until_s[lease.tenant]
                until_s[key] = max(until_s[key], now_s + lease.renewal_s)

    def end(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            lease = self.held.pop(key, None)
            if lease is not None:
                own = self._until_s[lease.tenant]
                del own[key]
                if not own:
                    del self._until_s[lease.tenant]
        if not self.held:
            self._ends.clear()

    def expire(self, now_s: float) -> None:
        ends = self._ends
        over = []
        while ends and ends[0][0] <= now_s:
            _, key = heappop(ends)
            lease = self.held.get(key)
            if lease is not None:
                until_s = self._until_s[lease.tenant][key]
                if until_s <= now_s:
                    over.append(key)
                else:
                    heappush(ends, (until_s, key))
        if over:
            self.end(over)
        if len(ends) > 4 * len(self.held) + 64:
            self._ends = [
                (until_s, key) for own in self._until_s.values() for key, until_s in own.items()
            ]
            heapify(self._ends)

    def of(self, tenant: str, owner: str) -> list[OffloadKey]:
        return [key for key in self._until_s.get(tenant, ()) if self.held[key].owner == owner]

    def prefetched(self, keys: Iterable[OffloadKey], tenant: str, owner: str) -> list[OffloadKey]:
        """Return the ``keys`` that were prefetched for this owner."""
        own, held = self._until_s.get(tenant, ()), self.held
        return [
            key for key in keys if key in own and held[key].is_prefetch and held[key].owner == owner
        ]

    def retained(self) -> Sequence[OffloadKey]:
        """Return the leased chunks that may be evicted, lowest priority first."""
        found = [
            (lease.priority, self._until_s[lease.tenant][key], key)
            for key, lease in self.held.items()
            if lease.priority is not None
        ]
        return [key for _, _, key in sorted(found)]

    def _is_better(self, old: Lease, old_s: float, new: Lease, new_s: float) -> bool:
        if (old.tenant, old.owner, old.is_prefetch) == (new.tenant, new.owner, new.is_prefetch):
            return False
        # A retained range must not replace a pin, even if the range lasts longer.
        old_rank, new_rank = _rank(old), _rank(new)
        return old_rank > new_rank or (old_rank == new_rank and old_s >= new_s)

    def _make_room(self, own: dict[OffloadKey, float], keys: Sequence[OffloadKey]) -> int:
        """End leases of tenants above their share; return how many new leases fit the budget."""
        asked = set(keys)
        wanted = sum(key not in self.held for key in keys)
        room = self.budget - len(self.held)
        share = self.budget // len(self._until_s)
        for other in sorted(self._until_s.values(), key=len, reverse=True):
            lacking = min(wanted, share - len(own)) - room
            excess = len(other) - share
            if lacking <= 0 or excess <= 0:
                break
            # Ending a requested chunk's lease frees no room, because the chunk needs a new lease.
            others = [key for key in other if key not in asked]
            lost = nsmallest(min(lacking, excess), others, key=other.__getitem__)
            room += len(lost)
            for key in lost:
                del self.held[key], other[key]
        # The room is negative if the budget was lowered below the number of leases.
        return max(0, room)


def _rank(lease: Lease) -> float:
    return inf if lease.priority is None else lease.priority
