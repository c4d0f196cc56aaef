"""The leases that the manager should have, derived from receipts, uses and the clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvtier_sdk.tiering.records import Slot, SlotState
from kvtier_sdk.types import OffloadKey
from support.simulation.breach import short

if TYPE_CHECKING:
    from support.simulation.world import World


@dataclass(frozen=True, slots=True)
class Terms:
    tenant: str
    owner: str
    until_s: float
    renewal_s: float
    rank: float  # the priority of a retained chunk; infinite for a pinned one


class LeaseRecord:
    def __init__(self, world: World) -> None:
        self.held: dict[OffloadKey, Terms] = {}
        slots = world.plan.slots
        reserve = round(slots * world.plan.store_reserve)
        self._budget = min(int(slots * world.hints.share), slots - reserve)
        self._inside = world.inside
        self._clock = world.clock
        self._breach = world.breach
        # Leased chunks that are not readable yet. Their store or load may still fail.
        self._unborn: set[OffloadKey] = set()
        # For each chunk that an operator's purge may remove, the step in which the purge begins.
        self.purged: dict[OffloadKey, int] = {}
        self._is_resetting = False
        self._removed: list[OffloadKey] | None = None
        self._before: Counter[str] = Counter()
        self._step = 0

    # --- what happens to chunks ---------------------------------------------------------------

    def used(self, keys: Iterable[OffloadKey]) -> None:
        now_s = self._clock.now_s()
        for key in keys:
            old = self.held.get(key)
            if old is not None and old.renewal_s:
                until_s = max(old.until_s, now_s + old.renewal_s)
                self.held[key] = Terms(old.tenant, old.owner, until_s, old.renewal_s, old.rank)

    def arrived(self, key: OffloadKey) -> None:
        self._unborn.discard(key)

    def left(self, key: OffloadKey) -> None:
        if self._removed is not None:
            self._removed.append(key)
        else:
            self._step = self._inside.primary.step
            self._leave(key)

    def reset(self) -> None:
        self._is_resetting = True
        self.held.clear()
        self._unborn.clear()

    def reset_ended(self) -> None:
        self._is_resetting = False

    # --- hints --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Prepare for hints. :meth:`settle` checks the chunks that leave the pool from now on."""
        self._forget()
        self._removed = []
        self._step = self._inside.primary.step
        self._before = Counter(terms.tenant for terms in self.held.values())

    def of(self, tenant: str, owner: str) -> list[OffloadKey]:
        who = tenant, owner
        return [key for key, its in self.held.items() if (its.tenant, its.owner) == who]

    def end(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            del self.held[key]

    def grant(self, keys: Iterable[OffloadKey], terms: Terms) -> None:
        for key in keys:
            old = self.held.get(key)
            is_own = old is not None and (old.tenant, old.owner) == (terms.tenant, terms.owner)
            # Keep the lease of the higher rank, or the longer of two leases of equal rank.
            if old is None or is_own or (old.rank, old.until_s) < (terms.rank, terms.until_s):
                self.held[key] = terms
                slot = self._inside.primary.by_key.get(key)
                if slot is None or slot.state is not SlotState.READY:
                    self._unborn.add(key)

    def check_share(self, tenant: str, wanted: Collection[OffloadKey]) -> None:
        """Check that a tenant that wanted more leases could not get more."""
        if len(self.held) < self._budget:
            self._breach(
                "a tenant gets its share", f"{tenant!r} got less, {len(self.held)} are held"
            )
        share = self._budget // len({tenant, *self._before})
        counts = Counter(terms.tenant for terms in self.held.values())
        for key, terms in self.held.items():
            # A chunk that the tenant also wants need not lose its lease.
            if counts[tenant] < share < counts[terms.tenant] and key not in wanted:
                self._breach(
                    "a tenant gets its share",
                    f"{tenant!r} has {counts[tenant]}, {terms.tenant!r} {counts[terms.tenant]}",
                )

    def reclaim(self, askers: set[str], wanted: Collection[OffloadKey]) -> None:
        """Record the leases that the manager ended to make room; check the manager's choice."""
        removed = self._removed or ()
        there = self._inside.leases()
        spared = self._unborn.difference(self._inside.primary.by_key).union(wanted)
        lost = [key for key in self.held if key not in there and key not in spared]
        share = self._budget // max(1, len({*askers, *self._before}))
        for tenant in sorted({self.held[key].tenant for key in lost}):
            if not askers or askers == {tenant} or self._before[tenant] <= share:
                continue
            its = [key for key in lost if key in self.held and self.held[key].tenant == tenant]
            most = self._before[tenant] - share
            reclaimed = [key for key in its if key not in removed]
            if len(reclaimed) > most:
                self._breach("a tenant keeps its share", f"{tenant!r} lost {len(reclaimed)}")
            latest_s = max((self.held[key].until_s for key in reclaimed), default=0.0)
            # End leases of removed chunks too, because the manager may have reclaimed them before
            # the removal.
            self.end(its)
            for key, terms in self.held.items():
                is_due = terms.tenant == tenant and terms.until_s < latest_s
                # At the end of a step, ``wanted`` is empty, so the order cannot be checked.
                if is_due and wanted and key in there and key not in wanted:
                    self._breach("what ends first makes room", f"{short(key)} did not")

    def settle(self) -> None:
        """Check the chunks that have left the pool since ``begin``."""
        removed, self._removed = self._removed or [], None
        for key in removed:
            self._leave(key)

    # --- checks -------------------------------------------------------------------------------

    def check(self) -> None:
        self._forget()
        primary = self._inside.primary
        for key, step in list(self.purged.items()):
            if key not in primary.by_key and primary.step > step:
                del self.purged[key]
        leases = self._inside.leases()
        if len(leases) > self._budget:
            self._breach(
                "leases stay within their budget", f"{len(leases)} chunks, {self._budget} may be"
            )
        for key in [*self.held, *leases]:
            terms, its = self.held.get(key), leases.get(key)
            if key not in self._inside.primary.by_key:
                self._breach("leased chunks are in the pool", short(key))
            if its is None:
                self._breach("a lease lasts until its end", f"{short(key)}: {terms}")
            elif terms is None:
                self._breach("no lease outlives its end", f"{short(key)}: {its}")
            elif its != (terms.tenant, terms.owner, terms.until_s):
                self._breach("a lease has its terms", f"{short(key)}: {its}, not {terms}")

    def _forget(self) -> None:
        now_s, there = self._clock.now_s(), self._inside.leases()
        for key, terms in list(self.held.items()):
            if terms.until_s <= now_s or (key in self._unborn and key not in there):
                del self.held[key]
        self._unborn.intersection_update(self.held)

    def _leave(self, key: OffloadKey) -> None:
        terms = self.held.pop(key, None)
        if terms is None or self._is_resetting or key in self.purged:
            return
        if terms.until_s <= self._clock.now_s():
            return
        if terms.rank == inf:
            self._breach("a pinned chunk stays", f"{short(key)} was evicted: {terms}")
        for other, slot in self._inside.primary.by_key.items():
            its = self.held.get(other)
            order = (-inf, 0.0) if its is None else (its.rank, its.until_s)
            if order < (terms.rank, terms.until_s) and self._may_leave(slot):
                self._breach(
                    "retained chunks go last, by their priority",
                    f"{short(key)} went and {short(other)} stayed: {terms}, {its}",
                )

    def _may_leave(self, slot: Slot) -> bool:
        if slot.state is not SlotState.READY or slot.pins or slot.hit_step == self._step:
            return False
        return slot.offers is None or not slot.offers.owed


def within(
    keys: Sequence[OffloadKey], tokens: tuple[int, int], groups: int, tokens_each: int
) -> list[OffloadKey]:
    first, stop = (tokens[0] // tokens_each, (tokens[1] - 1) // tokens_each)
    return [key for index, key in enumerate(keys) if first <= index // groups <= stop]
