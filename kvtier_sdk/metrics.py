"""Metrics: each is declared once, as the typed field that the code increments.

:data:`METRICS` is the table of all metrics, and :func:`metric_samples` yields their values. An
exporter (Prometheus, an engine's own statistics) lives elsewhere and needs only these two.
"""

# ruff: noqa: RUF009 - what is called in the defaults below makes dataclass fields
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any


class MetricKind(Enum):
    """The direction in which a metric moves."""

    #: Only goes up.
    COUNTER = "counter"
    #: Goes up and down.
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: its exported name, which ends with the unit, and with ``_total`` for a counter.
        kind: counter or gauge.
        unit: ``chunks``, ``bytes``, ``seconds``, ``slots``; empty for a plain number.
        help: one sentence for an operator.
        labels: the names of its labels.
    """

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric.

    Attributes:
        metric: the metric.
        labels: a value for each of the metric's labels.
        value: the value, in the metric's unit.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


_METRIC = "kvtier.metric"


def _counter(name: str, unit: str, text: str) -> Any:
    metric = Metric(f"kvtier_{name}_total", MetricKind.COUNTER, unit, text, ("tier",))
    return field(default=0, metadata={_METRIC: metric})


def _counters(name: str, unit: str, text: str, *labels: str) -> Any:
    """Declare counters with labels; the field's keys are the label values, joined by dots."""
    metric = Metric(f"kvtier_{name}_total", MetricKind.COUNTER, unit, text, ("tier", *labels))
    return field(default_factory=Counter, metadata={_METRIC: metric})


def _gauge(name: str, unit: str, text: str, *labels: str) -> Any:
    metric = Metric(f"kvtier_{name}", MetricKind.GAUGE, unit, text, labels)
    return field(default=0, metadata={_METRIC: metric})


def _figures(name: str, kind: MetricKind, text: str, label: str) -> Any:
    """Declare values that a backend names; the field's keys are the names."""
    metric = Metric(f"kvtier_{name}", kind, "", text, ("tier", label))
    return field(default_factory=dict, metadata={_METRIC: metric})


@dataclass(slots=True)
class TierStats:
    """Counts of one tier, the primary tier included, since its manager was made.

    Attributes:
        name: the tier's name.
        backend: the backend's name; ``"primary"`` for the host pool.
        errors: the last few error texts, the newest last.
    """

    name: str
    backend: str
    hit_chunks: int = _counter("hit_chunks", "chunks", "Chunks that requests got from this tier.")
    found_chunks: int = _counter(
        "found_chunks", "chunks", "Chunks that were looked up in the tier and found."
    )
    absent_chunks: int = _counter(
        "absent_chunks", "chunks", "Chunks that were looked up in the tier and not found."
    )
    stored_chunks: int = _counter("stored_chunks", "chunks", "Chunks written to the tier.")
    loaded_chunks: int = _counter("loaded_chunks", "chunks", "Chunks read from the tier.")
    evicted_chunks: int = _counter("evicted_chunks", "chunks", "Chunks that the tier removed.")
    evicted_unread_chunks: int = _counter(
        "evicted_unread_chunks",
        "chunks",
        "Chunks that the tier removed before they were read; an estimate where it has over 1,024.",
    )
    not_admitted_chunks: int = _counter(
        "not_admitted_chunks",
        "chunks",
        "Chunks that were not offered to the tier, which would have removed them unread.",
    )
    stored_bytes: int = _counter("stored_bytes", "bytes", "Payload written to the tier.")
    loaded_bytes: int = _counter("loaded_bytes", "bytes", "Payload read from the tier.")
    store_s: float = _counter(
        "store_seconds", "seconds", "Duration of store jobs, added up even if they overlap."
    )
    load_s: float = _counter(
        "load_seconds", "seconds", "Duration of load jobs, added up even if they overlap."
    )
    misses: Counter[str] = _counters(
        "misses", "chunks", "Lookups answered MISS, once per chunk and request.", "reason"
    )
    failures: Counter[str] = _counters(
        "failed_chunks", "chunks", "Chunks of failed jobs.", "operation", "reason"
    )
    dropped: Counter[str] = _counters(
        "dropped_chunks",
        "chunks",
        "Chunks that were not stored, or were found but not loaded.",
        "operation",
        "reason",
    )
    retries: Counter[str] = _counters("retries", "", "Repeated calls of the tier.", "operation")
    restarts: int = _counter(
        "process_restarts", "", "Restarts of the tier's process after it died or was killed."
    )
    open_failures: int = _counter("open_failures", "", "Attempts to open the tier that failed.")
    is_open: int = _gauge("tier_open", "", "1 while the tier is open, else 0.", "tier")
    reads_open: int = _gauge(
        "read_breaker_open", "", "1 while lookups and loads are suspended, else 0.", "tier"
    )
    stores_open: int = _gauge(
        "store_breaker_open", "", "1 while stores are suspended, else 0.", "tier"
    )
    backend_counters: dict[str, float] = _figures(
        "backend_counter_total", MetricKind.COUNTER, "Counters of the backend's own.", "counter"
    )
    backend_gauges: dict[str, float] = _figures(
        "backend_gauge", MetricKind.GAUGE, "Gauges of the backend's own.", "gauge"
    )
    errors: list[str] = field(default_factory=list)

    def note_backend(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> None:
        """Take what the backend's own counters have gained, and new values of its gauges."""
        for name, gained in counters.items():
            self.backend_counters[name] = self.backend_counters.get(name, 0.0) + gained
        self.backend_gauges.update(gauges)

    def note_error(self, text: str) -> None:
        """Keep an error's text, unless it is among the last few."""
        if text not in self.errors:
            self.errors = [*self.errors[-4:], text]


@dataclass(slots=True)
class PoolUsage:
    """The use of the host pool now, in slots."""

    slots: int = _gauge("pool_slots", "slots", "Slots of the host pool.")
    free: int = _gauge("pool_free_slots", "slots", "Empty slots.")
    ready: int = _gauge("pool_ready_slots", "slots", "Slots that hold a readable chunk.")
    writing: int = _gauge("pool_writing_slots", "slots", "Slots that the device is writing.")
    loading: int = _gauge("pool_loading_slots", "slots", "Slots that a tier is writing.")
    quarantined: int = _gauge(
        "pool_quarantined_slots", "slots", "Slots without a chunk that running I/O may still touch."
    )
    pinned: int = _gauge(
        "pool_pinned_slots", "slots", "Slots with a readable chunk that cannot be evicted."
    )


def _declared(cls: type[TierStats] | type[PoolUsage]) -> list[tuple[Field[Any], Metric]]:
    return [(f, f.metadata[_METRIC]) for f in fields(cls) if _METRIC in f.metadata]


_OF_TIERS, _OF_POOL = _declared(TierStats), _declared(PoolUsage)

#: Every metric, once.
METRICS: tuple[Metric, ...] = tuple(metric for _, metric in (*_OF_TIERS, *_OF_POOL))


def metric_samples(stats: Sequence[TierStats], usage: PoolUsage | None = None) -> Iterator[Sample]:
    """Yield the values of all metrics.

    >>> stats = TierStats("disk", "file", stored_chunks=3)
    >>> [(s.metric.name, s.labels, s.value) for s in metric_samples([stats]) if s.value]
    [('kvtier_stored_chunks_total', ('disk',), 3)]

    Args:
        stats: the counts of each tier.
        usage: the use of the host pool; ``None`` if kvtier does not own the pool.

    Yields:
        One sample for each metric and combination of labels that has occurred.
    """
    for tier in stats:
        for declared, metric in _OF_TIERS:
            value = getattr(tier, declared.name)
            if isinstance(value, dict):
                for key, count in value.items():
                    yield Sample(
                        metric, (tier.name, *key.split(".", len(metric.labels) - 2)), count
                    )
            else:
                yield Sample(metric, (tier.name,), value)
    if usage is not None:
        for declared, metric in _OF_POOL:
            yield Sample(metric, (), getattr(usage, declared.name))
