"""A policy that knows the prefix tree: the manager tells it parents and positions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_sdk import (
    EvictionPolicy,
    HostPool,
    LookupResult,
    OffloadKey,
    RequestContext,
    make_offload_key,
)
from kvtier_sdk.engine import TieringManager
from kvtier_sdk.testing import VirtualClock

SLOTS = 8


class LeavesFirstPolicy(EvictionPolicy):
    """A policy that evicts the least recently used chunk without resident children."""

    uses_prefix = True

    def __init__(self) -> None:
        self.order: OrderedDict[OffloadKey, None] = OrderedDict()
        self.parents: dict[OffloadKey, OffloadKey | None] = {}
        self.positions: dict[OffloadKey, int] = {}

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        self.order[key] = None
        self.parents[key] = parent
        self.positions[key] = position

    def on_access(self, key: OffloadKey) -> None:
        self.order.move_to_end(key)

    def on_remove(self, key: OffloadKey) -> None:
        del self.order[key], self.parents[key], self.positions[key]

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        left = dict.fromkeys(filter(is_evictable, self.order))
        victims: list[OffloadKey] = []
        while left and len(victims) < count:
            needed = {self.parents[key] for key in self.order if key not in victims}
            # If all leaves are pinned, a parent goes after all.
            victims.append(next((key for key in left if key not in needed), next(iter(left))))
            del left[victims[-1]]
        return victims


def key_of(path: Sequence[int], group: int = 0) -> OffloadKey:
    """Return the key of a prefix, as in a chain of hashes."""
    return make_offload_key(bytes(path).ljust(32, b"."), group)


def prefix_of(path: Sequence[int], group: int = 0) -> list[OffloadKey]:
    return [key_of(path[: end + 1], group) for end in range(len(path))]


class Tree:
    """A manager with that policy and without secondary tiers."""

    def __init__(self) -> None:
        self.policy = LeavesFirstPolicy()
        self.pool = HostPool(SLOTS, 64)
        self.manager = TieringManager(self.pool, policy=self.policy, clock=VirtualClock())
        self.requests = 0

    def serve(self, path: Sequence[int]) -> list[OffloadKey]:
        """Look up a prompt, load the hits and store the rest; return the evicted chunks."""
        self.requests += 1
        request = RequestContext(f"request-{self.requests}")
        keys = prefix_of(path)
        self.manager.on_new_request(request)
        hits = 0
        for key in keys:
            if self.manager.lookup(key, request) is not LookupResult.HIT:
                break
            hits += 1
        self.manager.prepare_load(keys[:hits], request)
        output = self.manager.prepare_store(keys[hits:], request)
        self.manager.complete_store(output.keys_to_store, request)
        self.manager.complete_load(keys[:hits], request)
        self.manager.on_request_finished(request)
        self.manager.on_schedule_end()
        return list(output.evicted_keys)


@pytest.fixture
def tree() -> Iterator[Tree]:
    tree = Tree()
    yield tree
    tree.manager.shutdown(1.0)
    tree.pool.close()


def test_it_is_told_parents_and_positions(tree: Tree) -> None:
    tree.serve([1, 2, 3])
    tree.serve([1, 2, 4, 5])
    keys = {name: key_of([int(digit) for digit in name]) for name in ("1", "12", "123", "124")}
    last = key_of([1, 2, 4, 5])
    assert tree.policy.parents == {
        keys["1"]: None,
        keys["12"]: keys["1"],
        keys["123"]: keys["12"],
        keys["124"]: keys["12"],
        last: keys["124"],
    }
    assert [tree.policy.positions[key] for key in (*keys.values(), last)] == [0, 1, 2, 2, 3]


def test_a_leaf_goes_before_an_older_parent(tree: Tree) -> None:
    tree.serve([1, 2, 3])
    tree.serve([1, 2, 4])
    tree.serve([5, 6, 7])
    # One slot is free. The oldest two leaves go, not the trunk that both of them grow on.
    assert tree.serve([8, 8, 8]) == [key_of([1, 2, 3]), key_of([1, 2, 4])]
    assert key_of([1, 2]) in tree.policy.order


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS // 2), max_size=30))
def test_what_is_resident_is_a_tree_with_its_root(paths: list[list[int]]) -> None:
    tree = Tree()
    try:
        for path in paths:
            tree.serve(path)
            resident = set(tree.policy.order)
            assert {parent for parent in tree.policy.parents.values() if parent} <= resident
            # The last prompt is whole: its first chunks were not evicted for its last.
            assert set(prefix_of(path)) <= resident
    finally:
        tree.manager.shutdown(1.0)
        tree.pool.close()
