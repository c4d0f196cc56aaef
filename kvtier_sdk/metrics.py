"""All metrics. Each is declared as a dataclass field, and the code increments the field."""

# ruff: noqa: RUF009 - the calls in the defaults below make dataclass fields
from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from enum import Enum
from itertools import product
from typing import Any, Literal, NamedTuple, Self, TypeAlias

from kvtier_sdk.events import PRIMARY
from kvtier_sdk.hints import Outcome, Verb
from kvtier_sdk.types import Usage


class MetricKind(Enum):
    """The kind of a metric."""

    #: A value that only goes up.
    COUNTER = "counter"
    #: A value that goes up and down.
    GAUGE = "gauge"
    #: Observations, counted in buckets by size.
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """The declaration of a metric.

    Attributes:
        name: the exported name, which ends with the unit, followed by ``_total`` for a counter.
        kind: counter, gauge or histogram.
        unit: ``chunks``, ``tokens``, ``bytes``, ``seconds``, ``slots``; empty for a plain number.
        help: one sentence for an operator.
        labels: the names of the labels.
        bounds: upper bounds of a histogram's buckets, except the unbounded last bucket.
    """

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[float, ...] = ()


class HistogramValue(NamedTuple):
    """The ``counts`` of a histogram's buckets and the ``total`` of all observations."""

    counts: tuple[int, ...]
    total: float


class Sample(NamedTuple):
    """The ``value`` of a ``metric`` for one combination of its ``labels``."""

    metric: Metric
    labels: tuple[str, ...]
    value: float | HistogramValue


class Histogram:
    """A histogram. Only one thread may add observations; any thread may read the counts.

    Attributes:
        counts: the number of observations in each bucket; the last bucket is unbounded.
        total: the sum of all observations.

    Args:
        bounds: upper bounds of the buckets, in ascending order.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts: list[int] = [0] * (len(bounds) + 1)
        self.total: float = 0.0

    def observe(self, value: float) -> None:
        """Count one observation of ``value``."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_several(self, value: float, count: int) -> None:
        """Count ``count`` observations of ``value``."""
        self.counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    @property
    def value(self) -> HistogramValue:
        """The counts and the total up to now."""
        return HistogramValue(tuple(self.counts), self.total)


# Every series must exist from the start, so the label values are listed here. This module must not
# import the enums of higher layers, so a test compares the lists with the enums.
_JOBS = ("lookup", "load", "store")
_OPERATIONS = (*_JOBS, "delete", "purge")
_FAULTS = (
    *("auth", "cancelled", "capacity", "contract", "corrupt", "failed", "not_found"),
    *("timeout", "unavailable"),
)
_MISSES = (
    *("absent", "load_failed", "lookup_failed", "primary_full", "queue_full"),
    *("slower_than_recompute", "timeout", "unavailable"),
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
_UNITS = ("chunks", "tokens", "bytes", "seconds", "slots")
_Tiers: TypeAlias = Literal["all", "pool", "behind"]


class _Declared(NamedTuple):
    metric: Metric
    of: _Tiers
    keys: tuple[str, ...]


def _declare(
    kind: MetricKind,
    name: str,
    text: str,
    labels: tuple[str, ...],
    *,
    make: Callable[[], Any],
    of: _Tiers = "behind",
    bounds: tuple[float, ...] = (),
    keys: Iterable[str] = (),
) -> Any:
    stem = name.removesuffix("_total")
    # A metric with the label ``reason`` counts chunks, even if its name has no unit.
    unit = next((unit for unit in _UNITS if stem.endswith(unit)), "chunks" * ("reason" in labels))
    metric = Metric(f"kvtier_{name}", kind, unit, text, labels, bounds)
    return field(default_factory=make, metadata={_DECLARED: _Declared(metric, of, tuple(keys))})


def _counter(
    name: str, text: str, *labels: str, keys: Iterable[str] = (), of: _Tiers = "behind"
) -> Any:
    """Declare a counter, or with ``labels`` a dictionary keyed by label values joined by dots."""
    kind, make = MetricKind.COUNTER, Counter if labels else int
    return _declare(kind, f"{name}_total", text, ("tier", *labels), make=make, of=of, keys=keys)


def _gauge(
    name: str,
    text: str,
    labels: tuple[str, ...] = ("tier",),
    make: Callable[[], Any] = int,
    of: _Tiers = "behind",
) -> Any:
    return _declare(MetricKind.GAUGE, name, text, labels, make=make, of=of)


def _known_gauge(name: str, text: str, of: _Tiers = "all") -> Any:
    """Declare a gauge that is exported only once its value is known."""
    return _gauge(name, text, make=lambda: None, of=of)


def _job_histograms(name: str, text: str, bounds: tuple[float, ...]) -> Any:
    def make() -> dict[str, Histogram]:
        return {operation: Histogram(bounds) for operation in _JOBS}

    labels = ("tier", "operation")
    return _declare(MetricKind.HISTOGRAM, name, text, labels, make=make, bounds=bounds)


@dataclass(slots=True)
class TierStats:
    """The metrics of one primary or secondary tier since its manager was created.

    Attributes:
        name: the tier's name.
        backend: the backend's name; ``"primary"`` for the host pool.
        errors: the last five distinct error texts, the newest last.
        error_s: time of the newest error, by the tier's clock.
    """

    name: str
    backend: str
    build: tuple[str, ...] = _gauge(
        "build_info",
        "Always 1; the labels name the backend, its version, kvtier's, and the form of the core.",
        ("tier", "backend", "backend_version", "sdk_version", "contract", "core"),
        make=lambda: ("",) * 5,
        of="all",
    )
    hit_chunks: int = _counter(
        "hit_chunks", "Chunks that requests copied to the device out of this tier.", of="all"
    )
    saved_tokens: dict[str, float] = _counter(
        "saved_tokens", "Prompt tokens that hits of this tier spared the engine.", "model", of="all"
    )
    saved_prefill_s: dict[str, float] = _counter(
        *("saved_prefill_seconds", "Time in which the engine would have computed them.", "model"),
        of="all",
    )
    misses: Counter[str] = _counter(
        "misses",
        "Chunks that requests asked for and did not get, once per chunk and request.",
        "reason",
        keys=_MISSES,
        of="pool",
    )
    hints: Counter[str] = _counter(
        "hints",
        "Receipts for what callers and operators asked for, such as pins.",
        "verb",
        "outcome",
        keys=(f"{verb.value}.{outcome.value}" for verb, outcome in product(Verb, Outcome)),
        of="pool",
    )
    recompute_s: float | None = _known_gauge(
        "recompute_seconds",
        "Time in which the engine computes a chunk: configured or learnt; absent until known.",
        of="pool",
    )
    lookup_chunks: int = _counter(
        "lookup_chunks",
        "Chunks that were looked up in the tier: found, absent, failed, dropped or under way.",
    )
    found_chunks: int = _counter("found_chunks", "Chunks that the tier said it has.")
    absent_chunks: int = _counter("absent_chunks", "Chunks that the tier said it does not have.")
    stored_chunks: int = _counter("stored_chunks", "Chunks written to the tier.", of="all")
    loaded_chunks: int = _counter("loaded_chunks", "Chunks read from the tier.", of="all")
    evicted_chunks: int = _counter("evicted_chunks", "Chunks that the tier evicted.", of="all")
    evicted_unread_chunks: int = _counter(
        "evicted_unread_chunks",
        "Chunks that the tier evicted before they were read; an estimate where it has over 1,024.",
    )
    evicted_age_s: Histogram = _declare(
        MetricKind.HISTOGRAM,
        "evicted_age_seconds",
        "Time from a chunk's last store or use to its eviction.",
        ("tier",),
        make=lambda: Histogram(_AGES),
        of="pool",
        bounds=_AGES,
    )
    not_admitted_chunks: int = _counter(
        "not_admitted_chunks",
        "Chunks that were not offered to the tier, which would have evicted them unread.",
    )
    stored_bytes: int = _counter(
        "stored_bytes", "Payload written to the tier, before compression.", of="all"
    )
    loaded_bytes: int = _counter(
        "loaded_bytes", "Payload read from the tier, once it is expanded.", of="all"
    )
    stored_object_bytes: int = _counter(
        "stored_object_bytes", "Bytes written to the tier, headers included."
    )
    loaded_object_bytes: int = _counter(
        "loaded_object_bytes", "Bytes read from the tier, headers included."
    )
    compress_s: float = _counter("compress_seconds", "Time of threads that compress chunks.")
    expand_s: float = _counter("expand_seconds", "Time of threads that expand compressed chunks.")
    job_s: dict[str, Histogram] = _job_histograms(
        "job_seconds", "Time from a job's hand-over to its conclusion.", _SECONDS
    )
    job_chunks: dict[str, Histogram] = _job_histograms("job_chunks", "Chunks of a job.", _CHUNKS)
    failures: Counter[str] = _counter(
        "failed_chunks",
        "Chunks of jobs that did not succeed for them.",
        "operation",
        "reason",
        # Omit ``lookup.not_found``, because looking up an absent chunk is not a failure.
        keys=sorted({*map(".".join, product(_OPERATIONS, _FAULTS))} - {"lookup.not_found"}),
    )
    dropped: Counter[str] = _counter(
        "dropped_chunks",
        "Chunks that the tier was not asked for or not given, for want of room or health.",
        "operation",
        "reason",
        keys=_DROPS,
        of="all",
    )
    retries: Counter[str] = _counter(
        "retries", "Repeated calls of the tier.", "operation", keys=_JOBS
    )
    restarts: int = _counter(
        "process_restarts", "Restarts of the tier's process after it died or was killed."
    )
    open_failures: int = _counter("open_failures", "Attempts to open the tier that failed.")
    is_open: int = _gauge("tier_open", "1 while the tier is open, else 0.")
    reads_open: int = _gauge(
        "read_breaker_open", "1 while lookups and loads are suspended, else 0."
    )
    stores_open: int = _gauge("store_breaker_open", "1 while stores are suspended, else 0.")
    is_slow: int = _gauge(
        "tier_slow", "1 while loads or stores have been under way for 2 s without progress, else 0."
    )
    is_selective: int = _gauge(
        "tier_selective",
        "1 while the tier, being full, takes only chunks that were seen before, else 0.",
    )
    used_chunks: int | None = _known_gauge(
        "tier_used_chunks",
        "Chunks in the tier, by its own count; absent if it keeps none or is down.",
    )
    used_bytes: int | None = _known_gauge(
        "tier_used_bytes",
        "Bytes used in the tier, by its own count; absent if it keeps none or is down.",
    )
    capacity_bytes: int | None = _known_gauge(
        "tier_capacity_bytes",
        "The most bytes that the tier uses; absent if it has no limit or is down.",
    )
    free_bytes: int | None = _known_gauge(
        "tier_free_bytes",
        "Free bytes of the disk under the tier; absent if it has none or is down.",
    )
    backend_counters: dict[str, float] = _counter(
        "backend_counter", "Counters of the backend's own.", "counter"
    )
    backend_gauges: dict[str, float] = _gauge(
        "backend_gauge", "Gauges of the backend's own.", ("tier", "gauge"), make=dict
    )
    errors: list[str] = field(default_factory=list)
    error_s: float = 0.0

    def note_open(self, is_open: bool) -> None:
        """Set ``is_open`` and the breaker gauges. The breakers of a closed tier count as open."""
        self.is_open = int(is_open)
        self.reads_open = self.stores_open = int(not is_open)
        if not is_open:
            self.note_usage(None)

    def note_usage(self, usage: Usage | None) -> None:
        """Record the tier's ``usage``, which is ``None`` while unknown."""
        self.used_chunks, self.used_bytes, self.capacity_bytes, self.free_bytes = (
            (None,) * 4 if usage is None else astuple(usage)
        )

    def note_backend(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> None:
        """Add the increases of the backend's ``counters``, and set its changed ``gauges``."""
        for name, gained in counters.items():
            self.backend_counters[name] = self.backend_counters.get(name, 0.0) + gained
        self.backend_gauges.update(gauges)

    def note_error(self, text: str, now_s: float) -> None:
        """Record an error's ``text`` and time ``now_s``; keep only the last five distinct texts."""
        self.errors = [*[other for other in self.errors if other != text][-4:], text]
        self.error_s = now_s

    def copy(self) -> Self:
        """Return a copy that shares the histograms and the labelled counters with this object."""
        return replace(
            self,
            backend_counters=dict(self.backend_counters),
            backend_gauges=dict(self.backend_gauges),
        )


@dataclass(slots=True)
class PoolUsage:
    """The current use of the host pool, in slots."""

    slots: int = _gauge("pool_slots", "Slots of the host pool.", ())
    free: int = _gauge("pool_free_slots", "Empty slots.", ())
    ready: int = _gauge("pool_ready_slots", "Slots that hold a readable chunk.", ())
    writing: int = _gauge("pool_writing_slots", "Slots that the device is writing.", ())
    loading: int = _gauge("pool_loading_slots", "Slots that a tier is writing.", ())
    quarantined: int = _gauge(
        "pool_quarantined_slots", "Slots without a chunk that running I/O may still touch.", ()
    )
    pinned: int = _gauge(
        "pool_pinned_slots", "Slots with a readable chunk that cannot be evicted.", ()
    )
    leased: int = _gauge(
        "pool_leased_slots", "Slots that pins, retained ranges and prefetches hold.", ()
    )


def _declared(cls: type[TierStats] | type[PoolUsage]) -> dict[str, _Declared]:
    return {f.name: f.metadata[_DECLARED] for f in fields(cls) if _DECLARED in f.metadata}


_OF_STATS, _OF_USAGE = _declared(TierStats), _declared(PoolUsage)
_OF_TIERS = [(name, each) for name, each in _OF_STATS.items() if each.of != "pool"]
_OF_POOL = [(name, each) for name, each in _OF_STATS.items() if each.of != "behind"]

#: The declarations of all metrics.
METRICS: tuple[Metric, ...] = tuple(
    each.metric for each in (*_OF_STATS.values(), *_OF_USAGE.values())
)


def metric_samples(
    stats: Sequence[TierStats], usage: PoolUsage | None = None, *, zeros: bool = True
) -> Iterator[Sample]:
    """Yield the values of all metrics. Any thread may call this, even while counters change.

    >>> stats = TierStats("disk", "file", stored_chunks=3)
    >>> [(s.metric.name, s.labels) for s in metric_samples([stats]) if s.value == 3]
    [('kvtier_stored_chunks_total', ('disk',))]

    ``usage`` is ``None`` if kvtier does not own the pool. If ``zeros`` is false, omit combinations
    of labels that have not occurred.
    """
    for tier in stats:
        own = (tier.name,)
        for name, declared in _OF_POOL if tier.name == PRIMARY else _OF_TIERS:
            value, metric = getattr(tier, name), declared.metric
            if type(value) is int:
                yield Sample(metric, own, value)
            elif isinstance(value, dict):
                # Copy the items, because the counting thread can add a key during the loop.
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
