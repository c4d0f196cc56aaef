"""The budget against a model of it: a list of chunks, the least recently used first."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier_file.budget import Budget, Chunk
from kvtier_sdk import TierCapacityError

CAPACITY = 100
CHUNKS = st.builds(Chunk, st.sampled_from("ab"), st.sampled_from([b"1", b"2", b"3", b"4"]))
SIZES = st.integers(0, 60)
HEADROOMS = st.none() | st.integers(-50, 150)


class BudgetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(CAPACITY)
        self.stored: list[tuple[Chunk, int]] = []
        self.pinned: list[Chunk] = []
        self.reserved: dict[int, int] = {}

    def without(self, chunk: Chunk) -> list[tuple[Chunk, int]]:
        return [pair for pair in self.stored if pair[0] != chunk]

    @rule(chunk=CHUNKS)
    def touch(self, chunk: Chunk) -> None:
        known = [pair for pair in self.stored if pair[0] == chunk]
        assert self.budget.touch(chunk) == bool(known)
        self.stored = self.without(chunk) + known

    @rule(chunk=CHUNKS)
    def forget(self, chunk: Chunk) -> None:
        assert self.budget.forget(chunk) == (len(self.without(chunk)) < len(self.stored))
        self.stored = self.without(chunk)

    @rule(chunks=st.lists(CHUNKS, max_size=3))
    def pin(self, chunks: list[Chunk]) -> None:
        self.budget.pin(chunks)
        self.pinned += chunks

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pinned:
            chunk = data.draw(st.sampled_from(self.pinned))
            self.budget.unpin([chunk])
            self.pinned.remove(chunk)

    @rule(size=SIZES, headroom=HEADROOMS)
    def make_room_and_reserve(self, size: int, headroom: int | None) -> None:
        wanted = sum(self.reserved.values()) + size
        excess = sum(size for _, size in self.stored) + wanted - CAPACITY
        if headroom is not None:
            excess = max(excess, wanted - headroom)
        free_to_go = [pair for pair in self.stored if pair[0] not in self.pinned]
        if excess > sum(size for _, size in free_to_go):
            with pytest.raises(TierCapacityError):
                self.budget.victims(size, headroom)
            return
        expected = []
        for chunk, chunk_size in free_to_go:
            if excess <= 0:
                break
            expected.append(chunk)
            excess -= chunk_size
        assert self.budget.victims(size, headroom) == expected
        for chunk in expected:
            self.forget(chunk)
        self.reserved[self.budget.reserve(size)] = size

    @rule(data=st.data(), chunk=CHUNKS)
    def commit(self, data: st.DataObject, chunk: Chunk) -> None:
        if self.reserved:
            ticket = data.draw(st.sampled_from(sorted(self.reserved)))
            self.budget.commit(ticket, chunk)
            self.stored = [*self.without(chunk), (chunk, self.reserved.pop(ticket))]
            assert self.budget.release(ticket) == 0

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.reserved:
            ticket = data.draw(st.sampled_from(sorted(self.reserved)))
            assert self.budget.release(ticket) == self.reserved.pop(ticket)

    @invariant()
    def counts_agree(self) -> None:
        assert self.budget.used_bytes == sum(size for _, size in self.stored)
        assert self.budget.reserved_bytes == sum(self.reserved.values())
        assert self.budget.used_bytes + self.budget.reserved_bytes <= CAPACITY
        assert len(self.budget) == len(self.stored)
        assert all(chunk in self.budget for chunk, _ in self.stored)


TestBudget = BudgetMachine.TestCase


def test_an_unlimited_budget_never_evicts() -> None:
    budget = Budget(None)
    budget.add(Chunk("a", b"1"), 10**15)
    assert budget.victims(10**15) == []


def test_refusal_names_the_limit_that_was_met() -> None:
    budget = Budget(2048)
    with pytest.raises(TierCapacityError, match=r"room for 4 KiB: capacity is 2 KiB, and only 0 B"):
        budget.victims(4096)
    with pytest.raises(TierCapacityError, match=r"has 0 B above what min_free keeps"):
        budget.victims(1024, -4096)
