"""An engine works while one of its tiers opens slowly."""

from __future__ import annotations

from pathlib import Path

from support.live import Live, live
from support.runners import KEYS, misbehaving

from kvtier_sdk import RequestContext
from kvtier_sdk.metrics import metric_samples


def seen(engine: Live, tier: str) -> dict[str, float]:
    samples = metric_samples(engine.manager.stats)
    return {each.metric.name: each.value for each in samples if each.labels == (tier,)}


def assert_serves_without(engine: Live) -> None:
    host, hard_tier, _ = engine.manager.stats
    early = engine.begin("early")
    assert engine.settle(early, KEYS[0]) == ["MISS"]
    assert host.misses == {"unavailable": 1}
    engine.store(early, *KEYS[:4])
    assert hard_tier.dropped["store.unavailable"] == 4
    engine.manager.on_request_finished(early)
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    again = engine.begin("again")
    assert engine.settle(again, *KEYS[:4]) == ["HIT"] * 4
    engine.load(again, *KEYS[:4])
    engine.manager.on_request_finished(again)
    assert engine.manager.stats[2].hit_chunks == 4
    assert not any(engine.manager.left_over().values())
    metrics = seen(engine, "held")
    assert metrics["kvtier_tier_open"] == 0
    assert metrics["kvtier_read_breaker_open"] == metrics["kvtier_store_breaker_open"] == 1


def assert_serves_with(engine: Live) -> None:
    late = engine.begin("late")
    engine.store(late, *KEYS[8:12])
    engine.manager.reset_cache()
    engine.manager.on_reset_flushed()
    last = RequestContext("last")
    engine.manager.on_new_request(last, ["held"])
    assert engine.settle(last, *KEYS[8:12]) == ["HIT"] * 4
    engine.load(last, *KEYS[8:12])
    metrics = seen(engine, "held")
    assert metrics["kvtier_tier_open"] == 1
    assert metrics["kvtier_read_breaker_open"] == metrics["kvtier_store_breaker_open"] == 0
    assert metrics["kvtier_stored_chunks_total"] == metrics["kvtier_hit_chunks_total"] == 4


def test_tiers_open_side_by_side(tmp_path: Path, runner: str) -> None:
    specs = [
        misbehaving(runner, tmp_path / "diary", name=name, on_open="meet") for name in ("a", "b")
    ]
    with live(specs) as engine:
        assert [tier.is_open for tier in engine.manager.stats[1:]] == [1, 1]


def test_an_open_that_blocks_its_thread_for_long(tmp_path: Path, runner: str) -> None:
    options = {"required": False, "open_deadline": "200ms"}
    spec = misbehaving(runner, tmp_path / "diary", runner=options, on_open="block")
    with live([spec, "memory:"]) as engine:
        assert_serves_without(engine)
        (tmp_path / "diary.released").touch()
        while not engine.manager.stats[1].is_open:
            engine.step()
        assert_serves_with(engine)
