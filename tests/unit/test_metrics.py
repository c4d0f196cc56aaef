from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields

from support.engine import KEYS, A, B, Engine, stored_below
from support.monitoring import ALERT_RULES, DASHBOARD

from kvtier_sdk import CorruptChunkError
from kvtier_sdk.metrics import METRICS, Histogram, MetricKind, PoolUsage, TierStats, metric_samples
from kvtier_sdk.runner.jobs import Operation, Verdict
from kvtier_sdk.tiering.outputs import MissReason


def test_names_are_unique_and_say_their_unit() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for metric in METRICS:
        assert metric.help.endswith(".")
        stem = metric.name.removesuffix("_total")
        assert metric.name.startswith("kvtier_")
        assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
        assert stem.endswith(metric.unit) or metric.labels[-1:] == ("reason",)
        assert bool(metric.bounds) == (metric.kind is MetricKind.HISTOGRAM)
        assert list(metric.bounds) == sorted(metric.bounds)


QUESTIONS = [
    *("What did it save?", "Which tier saves how much?", "What is the hit rate, by tier?"),
    *("How full is it?", "How fast is it?", "Is it healthy now?"),
    *("Was it healthy in the last hour?", "Which tier fails, and why?", "Why do prompts miss?"),
    *("How much is written a day?", "Who waits, and for what?", "What is lost before it is read?"),
]


def test_the_dashboard_answers_its_questions_and_knows_only_metrics_as_alerts_do() -> None:
    panels = json.loads(DASHBOARD)["panels"]
    assert [panel["title"] for panel in panels] == QUESTIONS
    assert len({panel["id"] for panel in panels}) == len(panels)
    labels = {metric.name: {*metric.labels, "instance", "le"} for metric in METRICS}
    for panel in panels:
        for target in panel["targets"]:
            shown = re.findall(r"kvtier_\w+", target["expr"])
            known = [labels[name.removesuffix("_bucket")] for name in shown]
            # The legend may name only labels of the expression's first metric.
            legend = re.findall(r"{{(\w+)}}", target["legendFormat"])
            assert all({*legend} <= of for of in known[:1]), target
            grouped = re.findall(r"by \(([\w, ]+)\)", target["expr"])
            assert {*legend} <= {*", ".join(grouped).split(", ")}, target
    names = {metric.name for metric in METRICS}
    expressions = "".join(re.findall("expr: .*", ALERT_RULES))
    assert {name.removesuffix("_sum") for name in re.findall(r"kvtier_\w+", expressions)} <= names


def test_every_field_that_counts_is_declared() -> None:
    plain = {"name", "backend", "errors", "error_s"}
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


def test_every_series_exists_from_the_start() -> None:
    start = list(metric_samples([TierStats("host", "primary"), TierStats("far", "redis")]))
    series = {(s.metric.name, *s.labels) for s in start}
    assert len(series) == len(start)
    assert all(
        s.value in (0, 1) or (isinstance(s.value, tuple) and not s.value.total) for s in start
    )
    for reason in MissReason:
        assert ("kvtier_misses_total", "host", reason.value) in series
    for operation in set(Operation) - {Operation.TOUCH}:
        for verdict in set(Verdict) - {Verdict.OK}:
            labels = ("far", operation.value, verdict.value)
            is_answer = labels[1:] == ("lookup", "not_found")
            assert (("kvtier_failed_chunks_total", *labels) in series) is not is_answer
    unknown = "used_chunks used_bytes capacity_bytes free_bytes recompute_seconds"
    # The manager, which this test does not create, adds these series for its model.
    unknown += " saved_tokens_total saved_prefill_seconds_total"
    of_backends = "backend_counter_total backend_gauge"
    missing = {metric.name for metric in METRICS} - {name for name, *_ in series}
    assert {re.sub("kvtier_(tier_)?", "", name) for name in missing if "pool" not in name} == {
        *f"{unknown} {of_backends}".split()
    }


def test_a_histogram_counts_up_to_and_with_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(value)
    histogram.observe_several(2.0, 3)
    assert histogram.value == ((2, 4, 1), 16.0)


def test_a_job_is_observed_with_its_chunks(make: Callable[..., Engine]) -> None:
    engine = make(slots=8)
    stored_below(engine, *KEYS[:3])
    assert engine.settle(B, *KEYS[:3]) == ["HIT"] * 3
    tier = engine.manager.stats[1]
    for operation, chunks in (("lookup", 3), ("load", 3), ("store", tier.stored_chunks)):
        assert sum(tier.job_chunks[operation].counts) == sum(tier.job_s[operation].counts) > 0
        assert tier.job_chunks[operation].total == chunks


def test_the_pool_tells_how_long_a_chunk_was_unused_when_it_left(
    make: Callable[..., Engine],
) -> None:
    engine = make(slots=2)
    engine.store(A, *KEYS[:2])
    engine.clock.advance(600.0)
    assert engine.settle(A, KEYS[0]) == ["HIT"]
    engine.clock.advance(60.0)
    engine.step()
    engine.store(B, KEYS[2], KEYS[3])
    age = engine.manager.stats[0].evicted_age_s
    assert sum(age.counts) == engine.manager.stats[0].evicted_chunks == 2
    assert age.total >= 2 * 660.0


def test_the_fill_of_each_tier_is_told(make: Callable[..., Engine]) -> None:
    engine = make(slots=4)
    stored_below(engine, *KEYS[:2])
    engine.step(16.0)
    engine.step()
    host, tier = engine.manager.stats
    assert host.used_chunks == 4
    assert host.used_bytes == host.capacity_bytes == 4 * engine.manager._pool.chunk_bytes
    assert tier.used_chunks == tier.stored_chunks
    assert tier.used_bytes
    assert tier.capacity_bytes is None
