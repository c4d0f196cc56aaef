"""Metrics: each is declared once, as the typed field that the code increments.

:data:`METRICS` is the table of all metrics, and :func:`metric_samples` yields their values. An
exporter (Prometheus, an engine's own statistics) lives elsewhere and needs only these two.
"""

# ruff: noqa: RUF009 - what is called in the defaults below makes dataclass fields
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from enum import Enum
from itertools import product
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from kvtier_sdk.events import PRIMARY
from kvtier_sdk.types import Usage


class MetricKind(Enum):
    """The direction in which a metric moves."""

    #: Only goes up.
    COUNTER = "counter"
    #: Goes up and down.
    GAUGE = "gauge"
    #: Counts observations by size.
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: its exported name, which ends with the unit, and with ``_total`` for a counter.
        kind: counter, gauge or histogram.
        unit: ``chunks``, ``bytes``, ``seconds``, ``slots``; empty for a plain number.
        help: one sentence for an operator.
        labels: the names of its labels.
        bounds: of a histogram, the upper bounds of its buckets; a last one without a bound follows.
    """

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()


class HistogramValue(NamedTuple):
    """The observations of a histogram at one moment.

    Attributes:
        counts: the number of observations in each bucket, that without a bound included.
        total: all observations added up.
    """

    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """One value of a metric.

    Attributes:
        metric: the metric.
        labels: a value for each of the metric's labels.
        value: the value, in the metric's unit; of a histogram, its observations.
    """

    metric: Metric
    labels: tuple[str, ...]
    value: float | HistogramValue


class Histogram:
    """Observations, counted by size. Belongs to one thread; any thread may read it.

    Attributes:
        counts: the number of observations in each bucket; the last one has no bound.
        total: all observations added up.

    Args:
        bounds: upper bounds of the buckets, growing.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def observe(self, value: float) -> None:
        """Count an observation of this size (``value``)."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_several(self, value: float, count: int) -> None:
        """Count so many observations (``count``) of one size (``value``)."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def value(self) -> HistogramValue:
        """The observations up to now."""
        return HistogramValue(tuple(self.counts), self.total)


# The values of labels, so that every series exists from the start. Enums of the layers above have
# the same values, and a test compares them.
_JOBS = ("lookup", "load", "store")
_OPERATIONS = (*_JOBS, "delete", "purge")
_FAULTS = (
    "auth",
    "cancelled",
    "capacity",
    "contract",
    "corrupt",
    "failed",
    "not_found",
    "timeout",
    "unavailable",
)
_MISSES = (
    "absent",
    "load_failed",
    "lookup_failed",
    "primary_full",
    "queue_full",
    "slower_than_recompute",
    "timeout",
    "unavailable",
)
_DROPS = (
    "lookup.unavailable",
    "store.drained",
    "store.slow",
    *map(".".join, product(("load", "store"), ("primary_full", "queue_full", "unavailable"))),
)

_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0),
)
_AGES = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86400.0)
_CHUNKS = tuple(float(1 << power) for power in range(11))

_DECLARED = "kvtier.metric"
_Tiers: TypeAlias = Literal["all", "pool", "behind"]


@dataclass(frozen=True, slots=True)
class _Declared:
    """A metric and the tiers that have it.

    Attributes:
        metric: the metric.
        of: which tiers have it: all, the host pool, or those behind it.
        keys: label values that exist from the start, joined by dots.
    """

    metric: Metric
    of: _Tiers = "all"
    keys: tuple[str, ...] = ()


def _counter(name: str, unit: str, text: str, of: _Tiers = "all") -> Any:
    metric = Metric(f"kvtier_{name}_total", MetricKind.COUNTER, unit, text, ("tier",))
    return field(default=0, metadata={_DECLARED: _Declared(metric, of)})


def _counters(
    name: str, unit: str, text: str, *labels: str, keys: Iterable[str], of: _Tiers = "all"
) -> Any:
    """Declare counters with labels; the field's keys are the label values, joined by dots."""
    metric = Metric(f"kvtier_{name}_total", MetricKind.COUNTER, unit, text, ("tier", *labels))
    declared = _Declared(metric, of, tuple(keys))
    return field(default_factory=Counter, metadata={_DECLARED: declared})


def _gauge(
    name: str, unit: str, text: str, *labels: str, default: Any = 0, of: _Tiers = "all"
) -> Any:
    metric = Metric(f"kvtier_{name}", MetricKind.GAUGE, unit, text, labels)
    return field(default=default, metadata={_DECLARED: _Declared(metric, of)})


def _figures(name: str, kind: MetricKind, text: str, label: str) -> Any:
    """Declare values that a backend names; the field's keys are the names."""
    metric = Metric(f"kvtier_{name}", kind, "", text, ("tier", label))
    return field(default_factory=dict, metadata={_DECLARED: _Declared(metric, "behind")})


def _facts(name: str, text: str, *labels: str) -> Any:
    """Declare a gauge that is always 1; the field's items are its label values."""
    metric = Metric(f"kvtier_{name}", MetricKind.GAUGE, "", text, ("tier", *labels))
    return field(default=("",) * len(labels), metadata={_DECLARED: _Declared(metric)})


def _job_histograms(name: str, unit: str, text: str, bounds: tuple[float, ...]) -> Any:
    """Declare a histogram for each operation."""
    metric = Metric(
        f"kvtier_{name}", MetricKind.HISTOGRAM, unit, text, ("tier", "operation"), bounds
    )
    return field(
        default_factory=lambda: {operation: Histogram(bounds) for operation in _JOBS},
        metadata={_DECLARED: _Declared(metric, "behind")},
    )


def _histogram(
    name: str, unit: str, text: str, bounds: tuple[float, ...], of: _Tiers = "all"
) -> Any:
    metric = Metric(f"kvtier_{name}", MetricKind.HISTOGRAM, unit, text, ("tier",), bounds)
    return field(
        default_factory=lambda: Histogram(bounds), metadata={_DECLARED: _Declared(metric, of)}
    )


@dataclass(slots=True)
class TierStats:
    """Counts of one tier, the primary tier included, since its manager was made.

    Attributes:
        name: the tier's name.
        backend: the backend's name; ``"primary"`` for the host pool.
        errors: the last few error texts, the newest last.
        error_s: time of the newest on the tier's clock.
    """

    name: str
    backend: str
    build: tuple[str, ...] = _facts(
        "build_info",
        "Always 1; the labels name the backend, its version, kvtier's, and the form of the core.",
        "backend",
        "backend_version",
        "sdk_version",
        "contract",
        "core",
    )
    hit_chunks: int = _counter(
        "hit_chunks", "chunks", "Chunks that requests copied to the device out of this tier."
    )
    misses: Counter[str] = _counters(
        "misses",
        "chunks",
        "Chunks that requests asked for and did not get, once per chunk and request.",
        "reason",
        keys=_MISSES,
        of="pool",
    )
    recompute_s: float | None = _gauge(
        "recompute_seconds",
        "seconds",
        "Time in which the engine computes a chunk: configured or learnt; absent until known.",
        "tier",
        default=None,
        of="pool",
    )
    lookup_chunks: int = _counter(
        "lookup_chunks",
        "chunks",
        "Chunks that were looked up in the tier: found, absent, failed, dropped or under way.",
        of="behind",
    )
    found_chunks: int = _counter(
        "found_chunks", "chunks", "Chunks that the tier said it has.", of="behind"
    )
    absent_chunks: int = _counter(
        "absent_chunks", "chunks", "Chunks that the tier said it does not have.", of="behind"
    )
    stored_chunks: int = _counter("stored_chunks", "chunks", "Chunks written to the tier.")
    loaded_chunks: int = _counter("loaded_chunks", "chunks", "Chunks read from the tier.")
    evicted_chunks: int = _counter("evicted_chunks", "chunks", "Chunks that the tier evicted.")
    evicted_unread_chunks: int = _counter(
        "evicted_unread_chunks",
        "chunks",
        "Chunks that the tier evicted before they were read; an estimate where it has over 1,024.",
        of="behind",
    )
    evicted_age_s: Histogram = _histogram(
        "evicted_age_seconds",
        "seconds",
        "Time from a chunk's last store or use to its eviction.",
        _AGES,
        of="pool",
    )
    not_admitted_chunks: int = _counter(
        "not_admitted_chunks",
        "chunks",
        "Chunks that were not offered to the tier, which would have evicted them unread.",
        of="behind",
    )
    stored_bytes: int = _counter("stored_bytes", "bytes", "Payload written to the tier.")
    loaded_bytes: int = _counter("loaded_bytes", "bytes", "Payload read from the tier.")
    job_s: dict[str, Histogram] = _job_histograms(
        "job_seconds", "seconds", "Time from a job's hand-over to its conclusion.", _SECONDS
    )
    job_chunks: dict[str, Histogram] = _job_histograms(
        "job_chunks", "chunks", "Chunks of a job.", _CHUNKS
    )
    failures: Counter[str] = _counters(
        "failed_chunks",
        "chunks",
        "Chunks of jobs that did not succeed for them.",
        "operation",
        "reason",
        keys=[
            key
            for key in map(".".join, product(_OPERATIONS, _FAULTS))
            if key != "lookup.not_found"  # an answer
        ],
        of="behind",
    )
    dropped: Counter[str] = _counters(
        "dropped_chunks",
        "chunks",
        "Chunks that the tier was not asked for or not given, for want of room or health.",
        "operation",
        "reason",
        keys=_DROPS,
    )
    retries: Counter[str] = _counters(
        "retries", "", "Repeated calls of the tier.", "operation", keys=_JOBS, of="behind"
    )
    restarts: int = _counter(
        "process_restarts",
        "",
        "Restarts of the tier's process after it died or was killed.",
        of="behind",
    )
    open_failures: int = _counter(
        "open_failures", "", "Attempts to open the tier that failed.", of="behind"
    )
    is_open: int = _gauge("tier_open", "", "1 while the tier is open, else 0.", "tier", of="behind")
    reads_open: int = _gauge(
        "read_breaker_open",
        "",
        "1 while lookups and loads are suspended, else 0.",
        "tier",
        of="behind",
    )
    stores_open: int = _gauge(
        "store_breaker_open", "", "1 while stores are suspended, else 0.", "tier", of="behind"
    )
    is_slow: int = _gauge(
        "tier_slow",
        "",
        "1 while loads or stores have been under way for 2 s without progress, else 0.",
        "tier",
        of="behind",
    )
    is_selective: int = _gauge(
        "tier_selective",
        "",
        "1 while the tier, being full, takes only chunks that were seen before, else 0.",
        "tier",
        of="behind",
    )
    used_chunks: int | None = _gauge(
        "tier_used_chunks",
        "chunks",
        "Chunks in the tier, by its own count; absent if it keeps none or is down.",
        "tier",
        default=None,
    )
    used_bytes: int | None = _gauge(
        "tier_used_bytes",
        "bytes",
        "Bytes used in the tier, by its own count; absent if it keeps none or is down.",
        "tier",
        default=None,
    )
    capacity_bytes: int | None = _gauge(
        "tier_capacity_bytes",
        "bytes",
        "The most bytes that the tier uses; absent if it has no limit or is down.",
        "tier",
        default=None,
    )
    free_bytes: int | None = _gauge(
        "tier_free_bytes",
        "bytes",
        "Free bytes of the disk under the tier; absent if it has none or is down.",
        "tier",
        default=None,
    )
    backend_counters: dict[str, float] = _figures(
        "backend_counter_total", MetricKind.COUNTER, "Counters of the backend's own.", "counter"
    )
    backend_gauges: dict[str, float] = _figures(
        "backend_gauge", MetricKind.GAUGE, "Gauges of the backend's own.", "gauge"
    )
    errors: list[str] = field(default_factory=list)
    error_s: float = 0.0

    @property
    def load_s(self) -> float:
        """Duration of load jobs, added up even if they overlap."""
        return self.job_s["load"].total

    @property
    def store_s(self) -> float:
        """Duration of store jobs, added up even if they overlap."""
        return self.job_s["store"].total

    def note_open(self, is_open: bool) -> None:
        """Note that the tier takes jobs again (``is_open``) or none; its breakers begin again."""
        self.is_open = int(is_open)
        self.reads_open = self.stores_open = int(not is_open)
        if not is_open:
            self.note_usage(None)

    def note_usage(self, usage: Usage | None) -> None:
        """Note how full the tier is: its ``usage``, or ``None`` while it cannot say."""
        self.used_chunks, self.used_bytes, self.capacity_bytes, self.free_bytes = (
            (None,) * 4 if usage is None else astuple(usage)
        )

    def note_backend(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> None:
        """Take what the backend's own counters have gained, and new values of its gauges."""
        for name, gained in counters.items():
            self.backend_counters[name] = self.backend_counters.get(name, 0.0) + gained
        self.backend_gauges.update(gauges)

    def note_error(self, text: str, now_s: float) -> None:
        """Keep the text of an error at ``now_s``, and the texts of a few others before it."""
        self.errors = [*[other for other in self.errors if other != text][-4:], text]
        self.error_s = now_s

    def copy(self) -> Self:
        """Return a copy; what a job adds to is shared, the state is not."""
        return replace(
            self,
            backend_counters=dict(self.backend_counters),
            backend_gauges=dict(self.backend_gauges),
        )


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


def _declared(cls: type[TierStats] | type[PoolUsage]) -> dict[str, _Declared]:
    return {f.name: f.metadata[_DECLARED] for f in fields(cls) if _DECLARED in f.metadata}


_OF_STATS, _OF_USAGE = _declared(TierStats), _declared(PoolUsage)
_OF_TIERS = [(name, each) for name, each in _OF_STATS.items() if each.of != "pool"]
_OF_POOL = [(name, each) for name, each in _OF_STATS.items() if each.of != "behind"]

#: Every metric, once, by the field of :class:`TierStats` or :class:`PoolUsage` that counts it.
METRICS_BY_FIELD: Mapping[str, Metric] = {
    **{name: each.metric for name, each in _OF_STATS.items()},
    **{f"pool_{name}": each.metric for name, each in _OF_USAGE.items()},
}

#: Every metric, once.
METRICS: tuple[Metric, ...] = tuple(METRICS_BY_FIELD.values())


def metric_samples(
    stats: Sequence[TierStats], usage: PoolUsage | None = None, *, zeros: bool = True
) -> Iterator[Sample]:
    """Yield the values of all metrics. Any thread may call it while the counts go on.

    >>> stats = TierStats("disk", "file", stored_chunks=3)
    >>> [(s.metric.name, s.labels) for s in metric_samples([stats]) if s.value == 3]
    [('kvtier_stored_chunks_total', ('disk',))]

    Args:
        stats: the counts of each tier.
        usage: the use of the host pool; ``None`` if kvtier does not own the pool.
        zeros: false to leave out combinations of labels that have not occurred.

    Yields:
        One sample for each metric and combination of labels. A gauge that is unknown has none.
    """
    for tier in stats:
        own = (tier.name,)
        for name, declared in _OF_POOL if tier.name == PRIMARY else _OF_TIERS:
            value, metric = getattr(tier, name), declared.metric
            if type(value) is int:
                yield Sample(metric, own, value)
            elif isinstance(value, dict):
                # Copied: the thread that counts may add a key meanwhile.
                items = list(value.items())
                if zeros:
                    items += [(key, 0) for key in declared.keys if key not in value]
                for key, found in items:
                    labels = (*own, *key.split(".", len(metric.labels) - 2))
                    yield Sample(metric, labels, _plain(found))
            elif isinstance(value, tuple):
                yield Sample(metric, own + value, 1)
            elif value is not None:
                yield Sample(metric, own, _plain(value))
    if usage is not None:
        for name, declared in _OF_USAGE.items():
            yield Sample(declared.metric, (), getattr(usage, name))


def _plain(value: float | Histogram) -> float | HistogramValue:
    return value.value if isinstance(value, Histogram) else value
