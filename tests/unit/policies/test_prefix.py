"""The 'prefix' policy evicts a prefix from its end, and hits at least as often as LRU and ARC."""

from __future__ import annotations

import random
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.workloads import WORKLOADS, generate

from kvtier_sdk import OffloadKey, RequestContext, load_policy
from kvtier_sdk.cli.replay import ReplayRequest
from kvtier_sdk.cli.replay.sweep import count_hits
from kvtier_sdk.policies.prefix import _CLASSES, PrefixPolicy, _Simulation

REQUEST = RequestContext("r")


@pytest.mark.parametrize("name", WORKLOADS)
def test_it_hits_no_less_than_lru_and_arc(name: str) -> None:
    workload = generate(name, 4000, seed=1)
    for slots in WORKLOADS[name]:
        hits = {
            policy: count_hits(workload, load_policy(policy)(), slots)
            for policy in ("lru", "arc", "prefix")
        }
        assert hits["prefix"] >= 0.99 * max(hits["lru"], hits["arc"]), (slots, hits)


def test_it_hits_much_more_where_chats_pause_for_longer_than_the_pool_lasts() -> None:
    workload = generate("pauses", 4000, seed=1)
    lru, prefix = (count_hits(workload, load_policy(name)(), 2000) for name in ("lru", "prefix"))
    assert prefix > 1.08 * lru


#: Requests as paths in a small prefix tree; a chunk's key depends on the chunks before it.
PATHS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=60)


@given(PATHS, st.integers(6, 12))
def test_the_end_of_a_prefix_leaves_before_its_start(paths: list[list[int]], slots: int) -> None:
    policy = Watched()
    workload = [
        ReplayRequest(str(n), tuple(bytes(path[:end]) for end in range(1, len(path) + 1)))
        for n, path in enumerate(paths)
    ]
    count_hits(workload, policy, slots)
    order = list(policy.choose_victims(slots, lambda key: True))
    for place, key in enumerate(order):
        assert key[:-1] not in order[:place]


class Watched(PrefixPolicy):
    def on_remove(self, key: OffloadKey) -> None:
        super().on_remove(key)
        assert not any(other[:-1] == key for other in self._uses)


def test_memory_is_bounded_however_many_chunks_pass() -> None:
    policy, slots = PrefixPolicy(), 512
    policy.open(slots)
    rng = random.Random(0)
    resident: dict[OffloadKey, None] = {}
    for _ in range(100 * slots):
        key = rng.randbytes(36)
        if len(resident) == slots:
            (victim,) = policy.choose_victims(1, lambda key: True)
            policy.on_remove(victim)
            del resident[victim]
        policy.on_insert(key, None, 0, REQUEST)
        resident[key] = None
    assert len(policy._older_ghosts) == 3 * slots > len(policy._ghosts)
    simulations = policy._simulations
    assert len(simulations._older) == 8 * slots // policy._one_in > len(simulations._last)
    for pool in simulations._pools:
        # The largest bonus is ``32 * slots`` references; a bucket holds ``slots / 64`` references.
        assert len(pool._counts) <= 33 * 64


@given(
    st.lists(st.tuples(st.integers(0, 15), st.integers(0, 2)), max_size=300),
    st.sampled_from([0.0, 1.0, 8.0]),
)
def test_a_simulation_hits_like_a_sorted_pool(uses: list[tuple[int, int]], weight: float) -> None:
    slots = 6
    bonuses = [round(weight * slots * log2(least)) for least in _CLASSES]
    simulation = _Simulation(bonuses, slots)
    last: dict[int, tuple[int, int]] = {}
    pool: dict[int, int] = {}
    floor = 0
    hits = 0
    for now, (chunk, more) in enumerate(uses, 1):
        of = min(last[chunk][1] + more, len(_CLASSES) - 1) if chunk in last else 0
        hits += pool.pop(chunk, None) is not None
        worth = now + bonuses[of]
        # A pool never keeps a chunk that is worth less than a chunk it has dropped.
        if worth >= floor:
            pool[chunk] = worth
        if len(pool) > slots:
            floor = min(pool.values()) + 1
            pool = {other: value for other, value in pool.items() if value >= floor}
        simulation.use(*last.get(chunk, (-1, 0)), now, of)
        last[chunk] = now, of
    assert simulation.hits == hits
