"""Eviction policies agree with a model of the resident chunks, and evict in the right order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from support.workloads import count_hits, generate

from kvtier_sdk import EvictionPolicy, KVTierError, OffloadKey, RequestContext, load_policy
from kvtier_sdk.policies.arc import ARCPolicy
from kvtier_sdk.policies.returns import ReturnsPolicy

NAMES = ["arc", "lru", "returns"]
REQUEST = RequestContext("r")
KEYS = st.integers(0, 9).map(lambda number: b"key-%d" % number)


def made(name: str, slots: int) -> EvictionPolicy:
    policy = load_policy(name)()
    assert type(policy).__name__.lower() == f"{name}policy"
    policy.open(slots)
    return policy


class PolicyMachine(RuleBasedStateMachine):
    name: str

    @initialize(slots=st.integers(1, 4))
    def start(self, slots: int) -> None:
        self.slots = slots
        self.policy = made(self.name, slots)
        self.request = REQUEST
        self.resident: set[OffloadKey] = set()
        self.pinned: set[OffloadKey] = set()

    @rule(key=KEYS)
    def insert(self, key: OffloadKey) -> None:
        if key in self.resident:
            return
        if len(self.resident) == self.slots:
            for victim in self.victims(1):
                self.remove(victim)
        if len(self.resident) < self.slots:
            self.policy.on_insert([key], self.request)
            self.resident.add(key)

    @rule(key=KEYS)
    def access(self, key: OffloadKey) -> None:
        if key in self.resident:
            self.policy.on_access([key], self.request)

    @rule(wait_s=st.sampled_from([0.1, 3.0, 1e4]), stop=st.sampled_from([None, "end"]), more=KEYS)
    def finish(self, wait_s: float, stop: str | None, more: OffloadKey) -> None:
        self.policy.on_request_finished(self.request, stop)
        self.policy.now_s += wait_s
        self.request = RequestContext(more.decode(), resume_in_s=wait_s if stop else None)

    @rule(key=KEYS)
    def remove(self, key: OffloadKey) -> None:
        if key in self.resident:
            self.policy.on_remove(key)
            self.resident.discard(key)
            self.pinned.discard(key)

    @rule(key=KEYS)
    def pin_or_unpin(self, key: OffloadKey) -> None:
        if key in self.resident:
            self.pinned ^= {key}

    @rule(count=st.integers(0, 10))
    def choose(self, count: int) -> None:
        self.victims(count)

    def victims(self, count: int) -> list[OffloadKey]:
        asked: list[OffloadKey] = []

        def is_evictable(key: OffloadKey) -> bool:
            asked.append(key)
            return key not in self.pinned

        victims = list(self.policy.choose_victims(count, is_evictable))
        assert set(asked) <= self.resident, "asked about a chunk that is not there"
        assert len(set(victims)) == len(victims)
        assert set(victims) <= self.resident - self.pinned
        assert len(victims) == min(count, len(self.resident - self.pinned))
        return victims

    @invariant()
    def every_resident_chunk_can_go(self) -> None:
        found = self.policy.choose_victims(self.slots, lambda key: True)
        assert set(found) == self.resident
        for key in self.resident:
            assert list(self.policy.choose_victims(1, lambda other, key=key: other == key)) == [key]

    @invariant()
    def choosing_changes_nothing(self) -> None:
        first = list(self.policy.choose_victims(self.slots, lambda key: True))
        assert list(self.policy.choose_victims(self.slots, lambda key: True)) == first

    @invariant()
    def arc_is_as_the_paper_has_it(self) -> None:
        if type(self.policy) is ARCPolicy:
            check_arc(self.policy, self.slots)

    @invariant()
    def returns_knows_each_chunk_once(self) -> None:
        if type(self.policy) is ReturnsPolicy:
            check_returns(self.policy, self.resident, self.slots)


def check_returns(policy: ReturnsPolicy, resident: set[OffloadKey], slots: int) -> None:
    groups, ghosts = policy._groups, policy._ghosts
    assert groups.keys() == resident
    assert not groups.keys() & ghosts.keys()
    assert len(ghosts) <= 6 * slots
    present, left = Counter(groups.values()), Counter([*groups.values(), *ghosts.values()])
    assert all((group.present, group.left) == (present[group], left[group]) for group in left)


def check_arc(policy: ARCPolicy, slots: int) -> None:
    t1, t2 = policy._once, policy._again
    b1, b2 = policy._once_ghosts, policy._again_ghosts
    assert len(t1) + len(t2) <= slots
    assert len(t1) + len(b1) <= slots
    assert len(t1) + len(t2) + len(b1) + len(b2) <= 2 * slots
    assert 0 <= policy._target <= slots
    assert len({*t1, *t2, *b1, *b2}) == len(t1) + len(t2) + len(b1) + len(b2)


def machine_of(policy: str) -> type:
    machine = type(f"Machine_{policy}", (PolicyMachine,), {"name": policy})
    case: type = machine.TestCase  # type: ignore[attr-defined]
    case.settings = settings(stateful_step_count=50)  # type: ignore[attr-defined]
    return case


TestARC, TestLRU, TestReturns = map(machine_of, NAMES)


@pytest.mark.parametrize(
    ("name", "calls", "order"),
    [
        ("lru", "abcA", "bca"),
        ("lru", "abcBA", "cba"),
        ("lru", "abc-bAbC", "abc"),
        # Chunks used once are evicted first, even if they were used later than chunks used twice.
        ("arc", "abA" + "cd", "bcda"),
        ("arc", "abcdBA", "cdba"),
        ("arc", "abcC-ad-ba", "cad"),
        ("arc", "abcC-ad-bae", "dcae"),
    ],
)
def test_the_order_of_eviction(name: str, calls: str, order: str) -> None:
    policy = made(name, 4)
    letters = iter(calls)
    for letter in letters:
        if letter == "-":
            policy.on_remove(next(letters).encode())
        elif letter.isupper():
            policy.on_access([letter.lower().encode()], REQUEST)
        else:
            policy.on_insert([letter.encode()], REQUEST)
    assert b"".join(policy.choose_victims(4, lambda key: True)).decode() == order


def test_a_ghost_of_the_second_list_gives_it_its_share_back() -> None:
    policy = ARCPolicy()
    policy.open(4)
    for key in (b"a", b"b", b"c"):
        policy.on_insert([key], REQUEST)
    policy.on_access([b"a"], REQUEST)
    policy.on_remove(b"b")
    policy.on_insert([b"b"], REQUEST)
    assert policy._target == 1
    policy.on_remove(b"a")
    policy.on_insert([b"a"], REQUEST)
    assert policy._target == 0


@pytest.mark.parametrize("policy", [ARCPolicy, ReturnsPolicy])
def test_a_policy_that_was_not_opened_is_refused(policy: type[EvictionPolicy]) -> None:
    with pytest.raises(KVTierError, match="open"):
        policy().on_insert([b"a"], REQUEST)


def test_a_scan_hurts_lru_but_not_arc() -> None:
    workload = generate("scans", 4000, seed=1)
    arc, lru = (count_hits(workload, load_policy(name)(), 400) for name in ("arc", "lru"))
    assert arc > 1.7 * lru
