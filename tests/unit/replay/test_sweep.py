"""A sweep over pool sizes counts the same hits as a replay with each size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from support.unlimited import unlimited_hits

from kvtier_sdk import TieringConfig
from kvtier_sdk.cli.replay import (
    PoolSweep,
    ReplayRequest,
    SweepPoint,
    chat_workload,
    replay,
    sweep,
    sweep_pool,
)
from kvtier_sdk.types import make_offload_key

CHUNK_BYTES = 64
HEADER_BYTES = 64


def replayed(
    workload: list[ReplayRequest], slots: int, policy: str = "lru", **tier: object
) -> list[int]:
    tiers = [{"type": "memory", **tier}] if tier else []
    options = {"slots": slots, "chunk_bytes": CHUNK_BYTES, "policy": policy, "tiers": tiers}
    report = replay(workload, TieringConfig.from_dict(options))
    return [tier.hit_chunks for tier in report.tiers]


@pytest.mark.parametrize("seed", range(2))
def test_lru_is_counted_as_full_replays_hit_in_pools_of_any_size(seed: int) -> None:
    played = chat_workload(120, seed)
    longest = max(len(request.keys) for request in played)
    for slots in range(2 * longest, 12 * longest, 97):
        swept = sweep_pool(played, pool_slots=slots)
        assert [swept.pool.hit_chunks] == replayed(played, slots)
    assert swept.points[-1].hit_chunks == unlimited_hits(played)
    assert (swept.share, swept.error) == (1.0, 0.0)


def test_another_policy_is_counted_as_full_replays_hit() -> None:
    played = chat_workload(400, 1)
    swept = sweep_pool(played, policy="arc", pool_slots=300)
    for point in (swept.pool, *swept.points[:3]):
        assert [point.hit_chunks] == replayed(played, point.slots, "arc")
    assert any(point.hit_chunks != point.lru_hit_chunks for point in swept.points)


def test_other_policies_are_counted_as_in_a_sweep_of_their_own() -> None:
    played = chat_workload(200, 1)
    options = {"pool_slots": 100, "compression_ratio": 1.5}
    policies = ("returns", "arc", "lru")
    alone = [sweep_pool(played, policy=name, **options) for name in policies]
    swept = sweep_pool(played, policy="returns", others=("arc", "lru"), **options)
    assert swept == dataclasses.replace(alone[0], others=tuple(alone[1:]))
    assert len({of.pool.hit_chunks for of in alone}) > 1
    assert [of["policy"] for of in swept.as_json(64)["other_policies"]] == ["arc", "lru"]


@pytest.mark.parametrize("most_played", [sweep._MOST_PLAYED, 500])
def test_progress_reaches_the_end_of_each_stage(
    monkeypatch: pytest.MonkeyPatch, most_played: int
) -> None:
    monkeypatch.setattr(sweep, "_MOST_PLAYED", most_played)
    left: dict[str, int] = {}

    @contextmanager
    def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
        left[label] = total
        yield lambda count: left.update({label: left[label] - count})

    sweep_pool(
        chat_workload(50, 1), policy="arc", others=["lru"], pool_slots=100, progress=progress
    )
    assert left == {"lru": 0, "arc": 0}


@pytest.mark.parametrize("ratio", [1.0, 1.48])
def test_a_tier_adds_what_it_adds_in_a_replay(ratio: float) -> None:
    played = chat_workload(600, 2)
    swept = sweep_pool(played, pool_slots=200, compression_ratio=ratio)
    larger = [point for point in swept.points if point.slots > 200]
    assert len(larger) >= 3
    for point in larger:
        capacity = int(ratio * point.slots) * (CHUNK_BYTES + HEADER_BYTES)
        host, tier = replayed(played, 200, capacity=capacity, admission="off")
        assert host == swept.pool.hit_chunks
        # The counts differ a little, because a tier stores and evicts the start of a prefix first.
        assert tier == pytest.approx(swept.tier_chunks(point), abs=0.002 * swept.chunks)


def test_an_estimate_is_near_the_truth_and_says_how_near(monkeypatch: pytest.MonkeyPatch) -> None:
    played = chat_workload(2000, 3)
    exact = sweep_pool(played, policy="arc", pool_slots=500)
    monkeypatch.setattr(sweep, "_MOST_PLAYED", -(-exact.chunks // 4))
    estimate = sweep_pool(played, policy="arc", pool_slots=500)
    assert estimate.share == 0.25
    assert 0 < estimate.error < 0.03
    for true, near in zip(exact.points, estimate.points, strict=True):
        assert near.lru_hit_chunks == true.lru_hit_chunks
        assert abs(near.hit_chunks - true.hit_chunks) <= 0.03 * exact.chunks


def test_a_request_that_names_a_chunk_twice_is_counted_as_it_is_played() -> None:
    a, b, c = (make_offload_key(bytes([letter]) * 32) for letter in b"abc")
    played = [
        ReplayRequest(str(at), keys) for at, keys in enumerate([(a, b, a), (a, b, a), (a, c)])
    ]
    swept = sweep_pool(played, pool_slots=6)
    assert [swept.pool.hit_chunks] == replayed(played, 6) == [4]
    assert swept.distinct_chunks == 3


@pytest.mark.parametrize(
    ("hits", "suggested"),
    [([10, 100, 500, 509, 518], 4), ([10, 100, 500, 505, 515], 16), ([300, 305], 1), ([0], 1)],
)
def test_the_suggested_size_is_the_one_beyond_which_no_doubling_gains_a_point(
    hits: list[int], suggested: int
) -> None:
    points = tuple(SweepPoint(2**at, hit, hit) for at, hit in enumerate(hits))
    swept = PoolSweep("lru", 10, 1000, 16, points, points[0], 1.0, 0.0)
    assert swept.suggested.slots == suggested


def test_a_workload_without_chunks_has_no_hits() -> None:
    swept = sweep_pool([ReplayRequest("empty", ())], policy="arc", pool_slots=10)
    assert [swept.rate(point.hit_chunks) for point in (*swept.points, swept.pool)] == [0.0, 0.0]
