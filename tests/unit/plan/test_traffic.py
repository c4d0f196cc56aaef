from __future__ import annotations

import pytest
from support.workloads import count_hits

from kvtier_sdk import TieringConfig, load_policy
from kvtier_sdk.cli.plan.traffic import Traffic, Window
from kvtier_sdk.cli.replay import ReplayRequest, chat_workload, replay
from kvtier_sdk.types import make_offload_key

CHUNK_BYTES = HEADER_BYTES = 64


@pytest.mark.parametrize("policy", ["lru", "returns"])
@pytest.mark.parametrize("tier_chunks", [400, 1000, 1_000_000])
def test_a_flow_is_that_of_a_replay(policy: str, tier_chunks: int) -> None:
    played = chat_workload(600, 2)
    capacity = tier_chunks * (CHUNK_BYTES + HEADER_BYTES)
    tier = {"type": "memory", "capacity": capacity, "admission": "off"}
    options = {"slots": 200, "chunk_bytes": CHUNK_BYTES, "policy": policy, "tiers": [tier]}
    host, memory = replay(played, TieringConfig.from_dict(options)).tiers
    flow = Traffic(played).flow(policy, 200, tier_chunks, Window())
    # A replay differs a little, because its tier stores and evicts the start of a prefix first.
    # The replay's requests also overlap, so its policy learns other times.
    near = {"lru": 0.002, "returns": 0.004}[policy] * flow.asked
    assert flow.asked == sum(len(request.keys) for request in played)
    assert flow.pool_hits == pytest.approx(host.hit_chunks, abs=near)
    assert flow.tier_hits == pytest.approx(memory.hit_chunks, abs=near)
    assert flow.stored == pytest.approx(memory.stored_chunks, abs=near)
    assert min(flow) > 0


@pytest.mark.parametrize("seed", range(3))
def test_lru_is_counted_exactly_for_pools_of_any_size(seed: int) -> None:
    played = chat_workload(120, seed)
    whole = Traffic(played)
    longest = max(len(request.keys) for request in played)
    for slots in range(2 * longest, 12 * longest, 97):
        hits = whole.flow("lru", slots, 0, Window()).pool_hits
        assert hits == count_hits(played, load_policy("lru")(), slots)


@pytest.mark.parametrize(
    ("prompts", "hits", "stored"),
    [(["ab", "xb"], 0, 3), (["aba", "aba", "ac"], 4, 3), (["abc", "abd"], 2, 4), ([""], 0, 0)],
)
def test_a_hit_needs_all_chunks_before_it(prompts: list[str], hits: int, stored: int) -> None:
    played = [
        ReplayRequest(prompt, tuple(make_offload_key(of.encode() * 32) for of in prompt))
        for prompt in prompts
    ]
    flow = Traffic(played).flow("lru", 6, 6, Window())
    assert (flow.pool_hits + flow.tier_hits, flow.stored) == (hits, stored)


def test_without_a_tier_nothing_is_stored() -> None:
    flow = Traffic(chat_workload(100, 1)).flow("lru", 200, 0, Window())
    assert (flow.tier_hits, flow.stored) == (0, 0)
    assert flow.pool_hits > 0


def returning(after_s: int, until_s: int) -> Traffic:
    """Return traffic that requests a new chunk each second, and again ``after_s`` seconds later."""
    numbers = [(at_s, number) for at_s in range(until_s) for number in (at_s, at_s - after_s)]
    return Traffic(
        [
            ReplayRequest(
                f"{at_s} {number}",
                (make_offload_key((number + after_s).to_bytes(32)),),
                arrived_s=float(at_s),
            )
            for at_s, number in numbers
        ]
    )


def test_a_forecast_counts_returns_that_the_window_is_almost_too_short_for() -> None:
    # In the first window, which lasts 100 s, chunks return only in the last 20 s.
    both = returning(after_s=80, until_s=200)
    size = 10_000
    forecast = both.flow("lru", size, 0, Window(0, 100, is_forecast=True))
    fact = both.flow("lru", size, 0, Window(100, 200))
    plain = both.flow("lru", size, 0, Window(0, 100))
    assert plain.pool_hits == 20
    assert forecast.pool_hits == pytest.approx(fact.pool_hits) == 100
    assert forecast.hit_rate == pytest.approx(fact.hit_rate) == 0.5


def test_a_cache_that_is_too_small_forecasts_no_returns() -> None:
    flow = returning(after_s=80, until_s=100).flow("lru", 60, 0, Window(0, 100, is_forecast=True))
    assert flow.pool_hits == 0
