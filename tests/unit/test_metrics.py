"""Each metric is declared once, and each counted value can be exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from support.engine import KEYS, A, B, Engine, stored_below

from kvtier_sdk import CorruptChunkError
from kvtier_sdk.metrics import METRICS, MetricKind, PoolUsage, TierStats, metric_samples


def test_names_are_unique_and_say_their_unit() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.help.endswith(".")
        stem = metric.name.removesuffix("_total")
        assert metric.name.startswith("kvtier_")
        assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
        assert stem.endswith(metric.unit) or metric.labels[-1:] == ("reason",)


def test_every_field_that_counts_is_declared() -> None:
    plain = {"name", "backend", "errors"}
    for cls in (TierStats, PoolUsage):
        assert all(f.metadata or f.name in plain for f in fields(cls))


def test_what_happened_shows(make: Callable[..., Engine]) -> None:
    engine = make(slots=4)
    stored_below(engine, *KEYS[:2])
    engine.tiers[0].on_load = lambda t: CorruptChunkError("x") if t.key == KEYS[1] else None
    assert engine.settle(B, *KEYS[:2]) == ["HIT", "MISS"]
    engine.load(B, KEYS[0])
    seen = {
        (sample.metric.name, *sample.labels): sample.value
        for sample in metric_samples(engine.manager.stats, engine.manager.usage())
    }
    assert seen["kvtier_hit_chunks_total", "tier0"] == 1
    assert seen["kvtier_found_chunks_total", "tier0"] == 2
    assert seen["kvtier_failed_chunks_total", "tier0", "load", "corrupt"] == 1
    assert seen["kvtier_misses_total", "host", "load_failed"] == 1
    assert seen["kvtier_pool_slots",] == 4
    labels = {
        sample.metric.name: len(sample.labels)
        for sample in metric_samples(engine.manager.stats, engine.manager.usage())
    }
    assert all(
        labels[metric.name] == len(metric.labels) for metric in METRICS if metric.name in labels
    )
    engine.manager.on_request_finished(A)


def test_a_backends_counters_never_fall_when_its_process_is_replaced() -> None:
    stats = TierStats("far", "redis")
    stats.note_backend({"resends": 3.0}, {"idle": 2.0})
    stats.note_backend({"resends": 0.0}, {"idle": 0.0})
    stats.note_backend({"resends": 1.0}, {})
    seen = {(s.metric.name, *s.labels): s.value for s in metric_samples([stats])}
    assert seen["kvtier_backend_counter_total", "far", "resends"] == 4
    assert seen["kvtier_backend_gauge", "far", "idle"] == 0
