from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_file.budget import Budget
from kvtier_file.chunks import SAME_USE_NS, ChunkId, next_use_ns
from kvtier_file.recency import staleness_ns
from kvtier_sdk import TierCapacityError

CAPACITY = 100
CHUNKS = st.builds(ChunkId, st.sampled_from("ab"), st.sampled_from([b"1", b"2", b"3", b"4"]))
SIZES = st.integers(0, 60)
HEADROOMS = st.none() | st.integers(-50, 150)
# These times are few and close: some uses are simultaneous, and some are in the same second.
TIMES = st.integers(1, 20).map(lambda step: step * SAME_USE_NS // 4)


@dataclass
class Stored:
    size_bytes: int
    counted_ns: int
    used_ns: int


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(CAPACITY, lambda chunk: self.stored[chunk].used_ns)
        self.stored: dict[ChunkId, Stored] = {}

    @rule(chunk=CHUNKS, size=SIZES, used_ns=TIMES)
    def add(self, chunk: ChunkId, size: int, used_ns: int) -> None:
        self.budget.add(*chunk, size, used_ns)
        self.stored[chunk] = Stored(size, used_ns, used_ns)

    @rule(chunk=CHUNKS, later_ns=TIMES, told=st.booleans())
    def use(self, chunk: ChunkId, later_ns: int, told: bool) -> None:
        if stored := self.stored.get(chunk):
            stored.used_ns = next_use_ns(stored.used_ns, stored.used_ns + later_ns)
            if told:
                stored.counted_ns = stored.used_ns
                self.budget.touch(chunk, stored.used_ns)

    @rule(chunk=CHUNKS)
    def forget(self, chunk: ChunkId) -> None:
        self.budget.discard(*chunk)
        self.stored.pop(chunk, None)

    @rule(
        need=SIZES,
        reserved=SIZES,
        headroom=HEADROOMS,
        pinned=st.sets(CHUNKS, max_size=3),
        open_namespaces=st.sets(st.sampled_from("ab")),
    )
    def make_room(
        self,
        need: int,
        reserved: int,
        headroom: int | None,
        pinned: set[ChunkId],
        open_namespaces: set[str],
    ) -> None:
        excess = sum(stored.size_bytes for stored in self.stored.values()) + need + reserved
        excess -= CAPACITY
        if headroom is not None:
            excess = max(excess, need + reserved - headroom)
        assert max(0, self.budget.excess_bytes(need, reserved, headroom)) == max(0, excess)

        def victims() -> list[ChunkId]:
            return self.budget.victims(
                need,
                reserved,
                headroom,
                pinned=pinned,
                open_namespaces=open_namespaces,
            )

        free_to_go = [chunk for chunk in self.stored if chunk not in pinned]
        if excess > sum(self.stored[chunk].size_bytes for chunk in free_to_go):
            with pytest.raises(TierCapacityError):
                victims()
            return
        # The first call copies the files' times to the budget. The second call uses the copies.
        for _ in range(2):
            expected = self.expected(free_to_go, excess, open_namespaces)
            assert victims() == expected
        for chunk in expected:
            self.forget(chunk)

    def expected(
        self, free_to_go: list[ChunkId], excess: int, open_namespaces: set[str]
    ) -> list[ChunkId]:
        now_ns = self.budget.latest_ns

        def rank(chunk: ChunkId) -> tuple[object, ...]:
            used_ns = self.stored[chunk].used_ns
            stale_ns = staleness_ns(used_ns, now_ns)
            is_open = chunk.fingerprint in open_namespaces
            return is_open, -stale_ns, chunk.fingerprint, used_ns, chunk

        chosen = []
        for chunk in sorted(free_to_go, key=rank):
            if excess <= 0:
                break
            chosen.append(chunk)
            excess -= self.stored[chunk].size_bytes
        return chosen

    @invariant()
    def counts_agree(self) -> None:
        assert self.budget.used_bytes == sum(one.size_bytes for one in self.stored.values())
        assert len(self.budget) == len(self.stored)
        assert all(used_ns <= self.budget.latest_ns for *_, used_ns in self.budget)
        assert all(chunk in self.budget for chunk in self.stored)
        for fingerprint, key, size_bytes, used_ns in self.budget:
            stored = self.stored[ChunkId(fingerprint, key)]
            assert stored.size_bytes == size_bytes
            assert stored.counted_ns <= used_ns <= stored.used_ns


TestBudget = BudgetMachine.TestCase


def victims(budget: Budget, need_bytes: int, headroom_bytes: int | None = None) -> list[ChunkId]:
    return budget.victims(need_bytes, 0, headroom_bytes, pinned=(), open_namespaces=())


def no_use(chunk: ChunkId) -> None:
    return None


def test_a_refusal_names_the_limit() -> None:
    budget = Budget(2048, no_use)
    with pytest.raises(TierCapacityError, match=r"room for 4 KiB: capacity is 2 KiB, and only 0 B"):
        victims(budget, 4096)
    with pytest.raises(TierCapacityError, match=r"has 0 B above what min_free keeps"):
        victims(budget, 1024, -4096)


def test_repeated_uses_leave_no_outdated_entries() -> None:
    budget = Budget(None, no_use)
    chunk = ChunkId("a", b"1")
    budget.add(*chunk, 1, 0)
    index = budget._indices["a"]
    for used_ns in range(1000):
        budget.touch(chunk, used_ns)
        if used_ns % 10 == 0:
            assert index.oldest()[0] == used_ns
        assert sum(map(len, index._heaps or ())) < 100


def test_a_chunk_whose_use_is_unknown_stays_counted() -> None:
    broken = {b"2"}

    def last_used_ns(chunk: ChunkId) -> int:
        if chunk.key in broken:
            raise OSError
        return 1

    budget = Budget(1, last_used_ns)
    for name in (b"1", b"2"):
        budget.add("a", name, 1, 1)
    with pytest.raises(OSError):
        victims(budget, 1)
    assert len(list(budget)) == 2
    broken.clear()
    assert len(victims(budget, 1)) == 2


def test_times_of_the_future_are_none_also_once_the_clock_was_set_back() -> None:
    budget = Budget(2, no_use)
    budget.know_time(1000)
    budget.add("a", b"early", 1, 500)
    budget.add("a", b"late", 1, 900)
    budget.add("a", b"future", 1, 1001)
    times_ns = {key: used_ns for _, key, _, used_ns in budget}
    assert times_ns == {b"early": 500, b"late": 900, b"future": 0}
    assert budget.latest_ns == 900
    budget.know_time(600)
    assert budget.latest_ns == 500
    assert victims(budget, 0) == [ChunkId("a", b"future")]
    assert [chunk.key for chunk in victims(budget, 1)] == [b"future", b"late"]
