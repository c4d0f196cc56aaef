"""Metrics over HTTP in Prometheus's format, for engines that have no metrics endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.metrics import METRICS, HistogramValue, Sample
from kvtier_sdk.processes import listener_of

#: A client that sends nothing for this time is disconnected, because it occupies a thread.
_SILENCE_S = 10.0


@contextmanager
def serve_metrics(
    collect: Callable[[], Iterable[Sample]], *, port: int, host: str = "127.0.0.1"
) -> Iterator[str]:
    """Serve metrics under ``/metrics`` until the ``with`` block ends; yield the URL.

    Args:
        collect: returns the current values, for example ``manager.samples``; a thread of the server
            calls it at each scrape.
        port: the port to listen on; 0 selects a free port.
        host: the address to listen on. Because there is no authentication, only this machine or the
            monitoring system should be able to reach the address.

    Raises:
        ConfigError: the extra ``metrics`` is not installed, or the port is not available.
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
        owner = listener_of(host, port)
        raise ConfigError(
            f"option 'metrics_port': cannot listen on {host}, port {port}: {error.strerror}"
            f"{f', by {owner}' if owner else ''}; give each engine of a machine a port of its own"
        ) from None
    handler: Any = server.RequestHandlerClass
    server.RequestHandlerClass = type("_Handler", (handler,), {"timeout": _SILENCE_S})
    # Keep the server's reports of broken connections out of the engine's stderr.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass(eq=False)
class _Collector:
    _samples: Callable[[], Iterable[Sample]]

    def collect(self) -> Iterable[Any]:
        from prometheus_client import core

        families: dict[str, Any] = {}
        for metric in METRICS:
            family = getattr(core, f"{metric.kind.value.capitalize()}MetricFamily")
            families[metric.name] = family(metric.name, metric.help, labels=metric.labels)
        for sample in self._samples():
            family, value = families[sample.metric.name], sample.value
            if isinstance(value, HistogramValue):
                names = [*map(str, sample.metric.bounds), "+Inf"]
                buckets = list(zip(names, accumulate(value.counts), strict=True))
                family.add_metric(sample.labels, buckets, value.total)
            else:
                family.add_metric(sample.labels, value)
        return families.values()
