"""kvtier's metrics in the form that vLLM collects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
)

from kvtier_sdk.metrics import METRICS, MetricKind, Sample

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingMetricMetadata


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric that may be emitted; vLLM asserts that each is declared."""
    kinds = {
        MetricKind.COUNTER: OffloadingCounterMetadata,
        MetricKind.GAUGE: OffloadingGaugeMetadata,
    }
    return {
        metric.name: kinds[metric.kind](documentation=metric.help, labelnames=metric.labels)
        for metric in METRICS
    }


class StatsFeed:
    """A converter from running totals to the increments that vLLM expects."""

    def __init__(self) -> None:
        self._taken: dict[tuple[str, tuple[str, ...]], float] = {}

    def take(self, samples: Iterable[Sample]) -> OffloadingConnectorStats | None:
        """Return what has changed since the last call.

        Args:
            samples: current values.

        Returns:
            Increments of counters and new values of gauges; all of them the first time. ``None``
            if nothing has changed.
        """
        stats = OffloadingConnectorStats()
        for sample in samples:
            name, labels = sample.metric.name, sample.labels
            before = self._taken.get((name, labels))
            # A first 0 counts as a change: a series without any value does not exist.
            if sample.value == before:
                continue
            self._taken[name, labels] = sample.value
            if sample.metric.kind is MetricKind.COUNTER:
                # A tier that was reopened counts from nothing.
                counted = 0 if before is None or before > sample.value else before
                stats.increase_counter(name, sample.value - counted, labels)
            else:
                stats.set_gauge(name, sample.value, labels)
        return None if stats.is_empty() else stats
