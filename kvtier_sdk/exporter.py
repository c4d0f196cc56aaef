"""Metrics over HTTP in Prometheus's format, for engines without an endpoint of their own.

An engine's endpoint shows what the engine was told in its last step. This one asks when it is
scraped, so that its gauges are true while the engine is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.metrics import METRICS, HistogramValue, Metric, MetricKind, Sample

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family


@contextmanager
def serve_metrics(
    collect: Callable[[], Iterable[Sample]], *, port: int, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve metrics under ``/metrics`` until the block ends.

    ::

        with (
            open_manager(pool, ["redis://cache/0"], namespace) as manager,
            serve_metrics(manager.samples, port=0) as url,
        ):
            print(url)  # http://127.0.0.1:43211/metrics

    Args:
        collect: returns the values; called in a thread of the server's at each scrape.
        port: the port; 0 for one that is free.
        host: the address to listen on. There is no authentication: leave it on this machine, or
            choose a network that only the monitoring reaches.

    Yields:
        The URL.

    Raises:
        ConfigError: the extra ``metrics`` is not installed, or the port cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"option 'metrics_port' needs {error.name}: pip install 'kvtier-sdk[metrics]'"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(
            f"option 'metrics_port': cannot listen on {host}, port {port}: {error.strerror}; give "
            "each engine of a machine a port of its own"
        ) from None
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Collector:
    """The values in the classes of prometheus_client."""

    def __init__(self, collect: Callable[[], Iterable[Sample]]) -> None:
        self._collect = collect

    def describe(self) -> list[Family]:
        return []

    def collect(self) -> Iterable[Family]:
        families = {metric.name: _family(metric) for metric in METRICS}
        for sample in self._collect():
            family, value = families[sample.metric.name], sample.value
            if isinstance(value, HistogramValue):
                names = [*map(str, sample.metric.bounds), "+Inf"]
                buckets = list(zip(names, accumulate(value.counts), strict=True))
                family.add_metric(sample.labels, buckets, value.total)
            else:
                family.add_metric(sample.labels, value)
        return families.values()


def _family(metric: Metric) -> Any:
    from prometheus_client import core

    classes: Mapping[MetricKind, Any] = {
        MetricKind.COUNTER: core.CounterMetricFamily,
        MetricKind.GAUGE: core.GaugeMetricFamily,
        MetricKind.HISTOGRAM: core.HistogramMetricFamily,
    }
    return classes[metric.kind](metric.name, metric.help, labels=metric.labels)
