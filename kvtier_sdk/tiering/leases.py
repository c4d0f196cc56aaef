"""Leases: chunks that stay in the primary tier for a time, whatever the policy thinks of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nsmallest
from math import inf

from kvtier_sdk.types import OffloadKey


@dataclass(frozen=True, eq=False)
class Lease:
    """The terms on which chunks are held, within the ``tenant``'s share of the budget."""

    tenant: str
    # The session, or the request if that is not named, which may replace the lease.
    owner: str
    # Each use of a chunk renews its lease to last at least this long; 0.0 for never.
    renewal_s: float
    # The chunks may be evicted if nothing else can be, lowest priority first; never if ``None``.
    priority: int | None
    # True if a prefetch holds the chunks, whose leases the owner's pins outlive.
    is_prefetch: bool = False


class Leases:
    """The leases of all tenants, who share one budget.

    A tenant may use what the others leave. If one asks for more than is left, the tenants that have
    more than an equal share of the budget lose the leases that would end first, down to that share.

    A chunk has one lease. A newer one replaces it if it holds the chunk faster, or as fast and for
    longer, or if its owner is the same.
    """

    def __init__(self, budget: int = 0) -> None:
        self.budget = budget
        self.held: dict[OffloadKey, Lease] = {}
        # The end of each chunk's lease, by tenant.
        self._until_s: dict[str, dict[OffloadKey, float]] = {}
        # The ends in order. Those of renewed and replaced leases are outdated.
        self._ends: list[tuple[float, OffloadKey]] = []

    def grant(self, keys: Iterable[OffloadKey], lease: Lease, until_s: float) -> int:
        """Hold chunks of the primary tier, from the first until the budget ends; count the held."""
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
        """Record a use of chunks, which renews their pins."""
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
        """End the leases whose time is over."""
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
        """Return the chunks of ``keys`` that prefetches hold for an owner."""
        own, held = self._until_s.get(tenant, ()), self.held
        return [
            key for key in keys if key in own and held[key].is_prefetch and held[key].owner == owner
        ]

    def retained(self) -> Sequence[OffloadKey]:
        """Return the held chunks that may be evicted, the least wanted first."""
        found = [
            (lease.priority, self._until_s[lease.tenant][key], key)
            for key, lease in self.held.items()
            if lease.priority is not None
        ]
        return [key for _, _, key in sorted(found)]

    def _is_better(self, old: Lease, old_s: float, new: Lease, new_s: float) -> bool:
        if (old.tenant, old.owner, old.is_prefetch) == (new.tenant, new.owner, new.is_prefetch):
            return False
        # A retained range that lasts longer must not let a pinned chunk go.
        old_rank, new_rank = _rank(old), _rank(new)
        return old_rank > new_rank or (old_rank == new_rank and old_s >= new_s)

    def _make_room(self, own: dict[OffloadKey, float], keys: Sequence[OffloadKey]) -> int:
        """Take leases from tenants that have more than their share; return how many fit now."""
        asked = set(keys)
        wanted = sum(key not in self.held for key in keys)
        room = self.budget - len(self.held)
        share = self.budget // len(self._until_s)
        for other in sorted(self._until_s.values(), key=len, reverse=True):
            lacking = min(wanted, share - len(own)) - room
            excess = len(other) - share
            if lacking <= 0 or excess <= 0:
                break
            # A lease on a wanted chunk makes no room: the chunk would need a lease again.
            others = [key for key in other if key not in asked]
            lost = nsmallest(min(lacking, excess), others, key=other.__getitem__)
            room += len(lost)
            for key in lost:
                del self.held[key], other[key]
        # A budget that was lowered may be exceeded.
        return max(0, room)


def _rank(lease: Lease) -> float:
    return inf if lease.priority is None else lease.priority
