"""kvtier's metrics in the form that vLLM collects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
)

from kvtier_sdk import (
    METRICS,
    HistogramValue,
    Metric,
    MetricKind,
    PoolUsage,
    Sample,
    TierStats,
    metric_samples,
)
from kvtier_vllm import compat

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the definitions of all metrics; vLLM asserts that each emitted metric has one."""
    # Shorten the log here, because vLLM calls this function in the process that logs.
    compat.shorten_log()
    return {metric.name: _definition(metric) for metric in METRICS}


def _definition(metric: Metric) -> OffloadingMetricMetadata:
    if metric.kind is MetricKind.HISTOGRAM:
        return OffloadingHistogramMetadata(
            documentation=metric.help, labelnames=metric.labels, buckets=metric.bounds
        )
    kinds = {
        MetricKind.COUNTER: OffloadingCounterMetadata,
        MetricKind.GAUGE: OffloadingGaugeMetadata,
    }
    return kinds[metric.kind](documentation=metric.help, labelnames=metric.labels)


class StatsFeed:
    """Converts running totals to the increments that vLLM expects."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, tuple[str, ...]], float | HistogramValue] = {}

    def take(
        self, stats: Sequence[TierStats], usage: PoolUsage | None = None
    ) -> OffloadingConnectorStats | None:
        """Return the changes since the last call; ``None`` if there are no changes."""
        told = OffloadingConnectorStats()
        for sample in metric_samples(stats, usage, zeros=not self._taken):
            name, labels, value = sample.metric.name, sample.labels, sample.value
            before = self._taken.get((name, labels))
            # Report a first 0 too, because a time series exists only once it has a value.
            if value == before:
                continue
            self._taken[name, labels] = value
            if isinstance(value, HistogramValue):
                assert before is None or isinstance(before, HistogramValue)
                _observe(told, sample, observations(sample.metric.bounds, before, value))
            elif sample.metric.kind is MetricKind.COUNTER:
                assert not isinstance(before, HistogramValue)
                # A smaller total means a reopened tier, whose counters start again from 0.
                counted = 0 if before is None or before > value else before
                told.increase_counter(name, value - counted, labels)
            else:
                told.set_gauge(name, value, labels)
        return None if told.is_empty() else told


def observations(
    bounds: Sequence[float], before: HistogramValue | None, now: HistogramValue
) -> list[float]:
    """Return observations that turn one state of a histogram into a later state."""
    # vLLM expects single observations, but kvtier keeps only a count per bucket and a total. The
    # returned observations lie in the same buckets and have the same total.
    if before is None or sum(before.counts) > sum(now.counts):
        before = HistogramValue((0,) * len(now.counts), 0.0)
    gained = [count - old for count, old in zip(now.counts, before.counts, strict=True)]
    lows = [0.0, *bounds]
    least = sum(low * count for low, count in zip(lows, gained, strict=True))
    rest = max(0.0, now.total - before.total - least)
    # Each observation starts at its bucket's lower bound. The rest of the total is spread over the
    # buckets in proportion to their widths. The last bucket has no upper bound, so it is made wide
    # enough for the rest.
    widths = [high - low for low, high in pairwise(lows)]
    widths.append(2 * rest / gained[-1] if gained[-1] else 0.0)
    room = sum(width * count for width, count in zip(widths, gained, strict=True))
    share = rest / room if room else 0.0
    return [
        low + share * width
        for low, width, count in zip(lows, widths, gained, strict=True)
        for _ in range(count)
    ]


def _observe(told: OffloadingConnectorStats, sample: Sample, values: Sequence[float]) -> None:
    name, labels = sample.metric.name, sample.labels
    for value in values:
        told.observe_histogram(name, value, labels)
    if not values:
        # Create the series without an observation, so that dashboards show 0 and not a gap.
        told.aggregate(
            OffloadingConnectorStats(
                data={"types": {name: "histogram"}, "data": {name: {labels: []}}}
            )
        )
