"""What is counted: each metric is declared once, as the typed field that the code counts in.

:data:`METRICS` is the table of them all, :func:`metric_samples` their values; whoever exports them
(Prometheus, an engine's own statistics) lives elsewhere and needs nothing else.
"""

# ruff: noqa: RUF009 - what is called in the defaults below makes dataclass fields
from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from enum import Enum
from typing import Any


class MetricKind(Enum):
    """How a metric moves."""

    #: Only up.
    COUNTER = "counter"
    #: Up and down.
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: as it is exported; ends with its unit, a counter with ``_total``.
        kind: counter or gauge.
        unit: ``chunks``, ``bytes``, ``seconds``, ``slots``; empty for a plain number.
        help: what it counts.
        labels: what tells its values apart.
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
        metric: which.
        labels: a value for each of the metric's labels.
        value: in the metric's unit.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float


_METRIC = "kvtier.metric"


def _counter(name: str, unit: str, text: str) -> Any:
    metric = Metric(f"kvtier_{name}_total", MetricKind.COUNTER, unit, text, ("tier",))
    return field(default=0, metadata={_METRIC: metric})


def _counters(name: str, unit: str, text: str, *labels: str) -> Any:
    """Counters told apart by labels, which are joined by dots in the field's keys."""
    metric = Metric(f"kvtier_{name}_total", MetricKind.COUNTER, unit, text, ("tier", *labels))
    return field(default_factory=Counter, metadata={_METRIC: metric})


def _gauge(name: str, unit: str, text: str, *labels: str) -> Any:
    metric = Metric(f"kvtier_{name}", MetricKind.GAUGE, unit, text, labels)
    return field(default=0, metadata={_METRIC: metric})


@dataclass(slots=True)
class TierStats:
    """What one tier has done since its manager was made. The primary tier has one too.

    Attributes:
        name: the tier's.
        backend: the backend's name; ``"primary"`` for the host pool.
        errors: the last few error texts, the newest last.
    """

    name: str
    backend: str
    hit_chunks: int = _counter(
        "hit_chunks", "chunks", "Chunks that a request got and that came from this tier."
    )
    found_chunks: int = _counter(
        "found_chunks", "chunks", "Chunks that the tier was asked for and had."
    )
    absent_chunks: int = _counter(
        "absent_chunks", "chunks", "Chunks that the tier was asked for and did not have."
    )
    stored_chunks: int = _counter("stored_chunks", "chunks", "Chunks written to the tier.")
    loaded_chunks: int = _counter("loaded_chunks", "chunks", "Chunks read from the tier.")
    evicted_chunks: int = _counter("evicted_chunks", "chunks", "Chunks that the tier let go of.")
    stored_bytes: int = _counter("stored_bytes", "bytes", "Payload written to the tier.")
    loaded_bytes: int = _counter("loaded_bytes", "bytes", "Payload read from the tier.")
    store_s: float = _counter(
        "store_seconds", "seconds", "Time that store jobs took; overlapping jobs count each."
    )
    load_s: float = _counter(
        "load_seconds", "seconds", "Time that load jobs took; overlapping jobs count each."
    )
    misses: Counter[str] = _counters(
        "misses", "chunks", "Lookups answered MISS, a chunk and request once.", "reason"
    )
    failures: Counter[str] = _counters(
        "failed_chunks", "chunks", "Chunks of jobs that failed.", "operation", "reason"
    )
    dropped: Counter[str] = _counters(
        "dropped_chunks",
        "chunks",
        "Chunks that were not stored, or were found and not loaded.",
        "operation",
        "reason",
    )
    retries: Counter[str] = _counters(
        "retries", "", "Calls of the tier that were made again.", "operation"
    )
    restarts: int = _counter(
        "process_restarts", "", "Times that the tier's process died and was started anew."
    )
    reads_open: int = _gauge(
        "read_breaker_open", "", "1 while lookups and loads are not tried, 0 otherwise.", "tier"
    )
    stores_open: int = _gauge(
        "store_breaker_open", "", "1 while stores are not tried, 0 otherwise.", "tier"
    )
    errors: list[str] = field(default_factory=list)

    def note_error(self, text: str) -> None:
        """Keep an error's text, unless it is among the last few already."""
        if text not in self.errors:
            self.errors = [*self.errors[-4:], text]


@dataclass(slots=True)
class PoolUsage:
    """How the host pool is used right now, in slots."""

    slots: int = _gauge("pool_slots", "slots", "Slots of the host pool.")
    free: int = _gauge("pool_free_slots", "slots", "Empty slots.")
    ready: int = _gauge("pool_ready_slots", "slots", "Slots that hold a readable chunk.")
    writing: int = _gauge("pool_writing_slots", "slots", "Slots that the device is writing.")
    loading: int = _gauge("pool_loading_slots", "slots", "Slots that a tier is writing.")
    quarantined: int = _gauge(
        "pool_quarantined_slots", "slots", "Slots without a chunk that somebody may still touch."
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
    """The values of all metrics.

    Args:
        stats: of each tier.
        usage: of the host pool; ``None`` where it is somebody else's.

    Yields:
        One sample for each metric and combination of labels that has occurred.
    """
    for tier in stats:
        for declared, metric in _OF_TIERS:
            value = getattr(tier, declared.name)
            if isinstance(value, Counter):
                for key, count in value.items():
                    yield Sample(
                        metric, (tier.name, *key.split(".", len(metric.labels) - 2)), count
                    )
            else:
                yield Sample(metric, (tier.name,), value)
    if usage is not None:
        for declared, metric in _OF_POOL:
            yield Sample(metric, (), getattr(usage, declared.name))
