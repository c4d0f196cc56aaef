"""Leases agree with a model that keeps each chunk's terms in a dictionary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtier_sdk import OffloadKey
from kvtier_sdk.tiering.leases import Lease, Leases

KEYS = st.lists(st.integers(0, 11).map(lambda number: b"key-%d" % number), max_size=8)
TENANTS = st.sampled_from(["", "a", "b"])
OWNERS = st.sampled_from(["s", "t"])
DURATIONS_S = st.sampled_from([1.0, 5.0, 60.0])


class Terms(NamedTuple):
    tenant: str
    owner: str
    until_s: float
    renewal_s: float
    rank: float

    @property
    def strength(self) -> tuple[float, float]:
        return self.rank, self.until_s


class LeaseMachine(RuleBasedStateMachine):
    @initialize(budget=st.integers(0, 8))
    def start(self, budget: int) -> None:
        self.budget = budget
        self.leases = Leases(budget)
        self.held: dict[OffloadKey, Terms] = {}
        self.now_s = 0.0

    @rule(
        keys=KEYS,
        tenant=TENANTS,
        owner=OWNERS,
        duration_s=DURATIONS_S,
        priority=st.sampled_from([None, None, 0, 80]),
    )
    def grant(
        self,
        keys: list[OffloadKey],
        tenant: str,
        owner: str,
        duration_s: float,
        priority: int | None,
    ) -> None:
        rank = inf if priority is None else priority
        renewal_s = duration_s if priority is None else 0.0
        terms = Terms(tenant, owner, self.now_s + duration_s, renewal_s, rank)
        granted = self.leases.grant(keys, Lease(tenant, owner, renewal_s, priority), terms.until_s)
        keys = list(dict.fromkeys(keys))
        self.make_room(tenant, keys)
        for key in keys[:granted]:
            old = self.held.get(key)
            if old is None or old[:2] == terms[:2] or old.strength < terms.strength:
                self.held[key] = terms
        if granted < len(keys):
            assert len(self.held) == self.budget
            counts = Counter(terms.tenant for terms in self.held.values())
            share = self.budget // len(counts | {tenant: 1})
            for key, other in self.held.items():
                assert key in keys or not counts[tenant] < share < counts[other.tenant]

    def make_room(self, tenant: str, keys: Sequence[OffloadKey]) -> None:
        """Remove the leases that a grant has ended; check that the grant may end them."""
        counts = Counter(terms.tenant for terms in self.held.values())
        share = self.budget // len(counts | {tenant: 1})
        lost = [key for key in self.held if key not in self.leases.held]
        for other, chunks in Counter(self.held[key].tenant for key in lost).items():
            assert other != tenant
            assert counts[tenant] < share <= counts[other] - chunks
        ends = {key: self.held.pop(key) for key in lost}
        for key, terms in self.held.items():
            for end in ends.values():
                assert key in keys or terms.tenant != end.tenant or terms.until_s >= end.until_s

    @rule(keys=KEYS)
    def use(self, keys: list[OffloadKey]) -> None:
        self.leases.renew(keys, self.now_s)
        for key in self.held.keys() & keys:
            terms = self.held[key]
            if terms.renewal_s:
                until_s = max(terms.until_s, self.now_s + terms.renewal_s)
                self.held[key] = terms._replace(until_s=until_s)

    @rule(keys=KEYS)
    def end(self, keys: list[OffloadKey]) -> None:
        self.leases.end(keys)
        for key in keys:
            self.held.pop(key, None)

    @rule(tenant=TENANTS, owner=OWNERS)
    def end_of_session(self, tenant: str, owner: str) -> None:
        own = self.leases.of(tenant, owner)
        assert set(own) == {key for key, terms in self.held.items() if terms[:2] == (tenant, owner)}
        self.end(own)

    @rule(wait_s=st.sampled_from([0.5, 1.0, 5.0, 100.0]))
    def expire(self, wait_s: float) -> None:
        self.now_s += wait_s
        self.leases.expire(self.now_s)
        self.held = {key: terms for key, terms in self.held.items() if terms.until_s > self.now_s}

    @invariant()
    def agrees(self) -> None:
        leases = self.leases
        assert {
            key: (lease.tenant, lease.owner, leases._until_s[lease.tenant][key])
            for key, lease in leases.held.items()
        } == {key: terms[:3] for key, terms in self.held.items()}
        assert len(leases.held) <= self.budget
        assert sum(map(len, leases._until_s.values())) == len(leases.held)
        assert all(leases._until_s.values()), "no tenant without a lease is remembered"
        order = [self.held[key].strength for key in leases.retained()]
        assert order == sorted(order)
        assert len(order) == sum(terms.rank < inf for terms in self.held.values())


TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(stateful_step_count=40)


def test_outdated_ends_are_forgotten() -> None:
    leases = Leases(1)
    lease = Lease("", "s", 0.0, None)
    for until_s in range(1000):
        leases.grant([b"key"], lease, 1e6 + until_s)
        leases.expire(0.0)
    assert len(leases._ends) < 100
