"""An engine works while one of its tiers opens slowly, or fails to open."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

from support.live import Live, live
from support.runners import KEYS, misbehaving

from kvtier_sdk import RequestContext, TierSpec
from kvtier_sdk.metrics import metric_samples

#: Values of ``open_deadline``: the tiers of these tests open within LONG, but not within SHORT.
LONG, SHORT = "60s", "200ms"


def hard(kind: str, folder: Path, *, deadline: str = LONG, **script: Any) -> TierSpec:
    options = {"required": False, "open_deadline": deadline}
    options |= {"probe_interval": 0.01, "max_probe_interval": 0.02}
    return misbehaving(kind, folder / "diary", runner=options, **script)


def seen(engine: Live, tier: str) -> dict[str, float]:
    samples = metric_samples(engine.manager.stats)
    return {each.metric.name: each.value for each in samples if each.labels == (tier,)}


def step_until_open(engine: Live) -> None:
    while not engine.manager.stats[1].is_open:
        engine.step()


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


def test_an_open_that_sleeps_for_an_hour(tmp_path: Path, runner: str) -> None:
    with live([hard(runner, tmp_path, deadline=SHORT, on_open="hang"), "memory:"]) as engine:
        assert_serves_without(engine)
        while engine.manager.stats[1].open_failures < 2:
            engine.step()
        assert "it did not open within 0.2 s" in engine.manager.stats[1].errors[0]


def test_an_open_that_blocks_its_thread_for_long(tmp_path: Path, runner: str) -> None:
    with live([hard(runner, tmp_path, deadline=SHORT, on_open="block"), "memory:"]) as engine:
        assert_serves_without(engine)
        (tmp_path / "diary.released").touch()
        step_until_open(engine)
        assert_serves_with(engine)


def test_an_open_that_holds_the_interpreter_of_its_process(tmp_path: Path) -> None:
    spec = hard("process", tmp_path, deadline=SHORT, on_open="hold_interpreter_while_locked")
    with open(tmp_path / "diary.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with live([spec, "memory:"]) as engine:
            assert_serves_without(engine)
            fcntl.flock(lock, fcntl.LOCK_UN)
            step_until_open(engine)
            assert_serves_with(engine)


def test_an_open_that_holds_the_interpreter_of_the_engine_holds_up_its_start(
    tmp_path: Path,
) -> None:
    spec = hard("thread", tmp_path, deadline=SHORT, on_open="hold_interpreter")
    with live([spec, "memory:"]) as engine:
        step_until_open(engine)
        assert_serves_with(engine)


def test_an_open_that_raises_every_third_time(tmp_path: Path, runner: str) -> None:
    for start in (1, 2, 3):
        spec = hard(runner, tmp_path, on_open="refuse_every_third")
        with live([spec, "memory:"]) as engine:
            assert seen(engine, "held")["kvtier_tier_open"] == (start < 3)
            step_until_open(engine)
            assert seen(engine, "held")["kvtier_open_failures_total"] == (start == 3)
            assert_serves_with(engine)
