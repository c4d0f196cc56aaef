from __future__ import annotations

import builtins
import socket
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.engine import KEYS, Engine, stored_below
from support.live import live
from support.server import free_port

from kvtier_sdk import (
    METRICS,
    ConfigError,
    MetricKind,
    TierStats,
    exporter,
    metric_samples,
    serve_metrics,
)


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    return {
        ",".join([sample.name, *sorted(map("=".join, sample.labels.items()))]): sample.value
        for family in families
        for sample in family.samples
    }


def test_every_metric_is_served_with_its_value(make: Callable[..., Engine]) -> None:
    engine = make(slots=8)
    stored_below(engine, *KEYS[:3])
    engine.step(16.0)
    engine.step()
    with serve_metrics(engine.manager.samples, port=0) as url:
        seen = scrape(url)
    assert seen["kvtier_stored_chunks_total,tier=tier0"] == engine.manager.stats[1].stored_chunks
    assert seen["kvtier_failed_chunks_total,operation=load,reason=timeout,tier=tier0"] == 0
    assert seen["kvtier_pool_slots"] == 8
    stores = sum(engine.manager.stats[1].job_s["store"].counts)
    assert seen["kvtier_job_seconds_count,operation=store,tier=tier0"] == stores > 0
    assert seen["kvtier_job_seconds_bucket,le=+Inf,operation=store,tier=tier0"] == stores
    served = {series.partition(",")[0] for series in seen}
    suffix = {MetricKind.HISTOGRAM: "_bucket"}
    named = {metric.name + suffix.get(metric.kind, "") for metric in METRICS}
    unknown = {"backend_counter_total", "backend_gauge", "recompute_seconds", "tier_free_bytes"}
    # The engine of this test does not report how many tokens a chunk has.
    unknown |= {"saved_tokens_total", "saved_prefill_seconds_total"}
    assert {name.removeprefix("kvtier_") for name in named - served} == unknown


def test_buckets_add_up() -> None:
    stats = TierStats("far", "redis")
    for seconds in (0.0001, 0.02, 0.02, 100.0):
        stats.job_s["load"].observe(seconds)
    with serve_metrics(lambda: metric_samples([stats]), port=0) as url:
        seen = scrape(url)
    buckets = [
        seen[f"kvtier_job_seconds_bucket,le={le},operation=load,tier=far"]
        for le in ("0.0005", "0.025", "30.0", "+Inf")
    ]
    assert buckets == [1, 3, 3, 4]
    assert seen["kvtier_job_seconds_sum,operation=load,tier=far"] == pytest.approx(100.0401)


def test_a_port_that_is_taken_is_an_error_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"127.0.0.1, port {port}: Address already in use"),
            live(["memory:"], metrics_port=port),
        ):
            pass


def test_the_port_is_free_again_when_the_manager_is_gone() -> None:
    port = free_port()
    for _ in range(2):
        with live(["memory:"], metrics_port=port):
            assert scrape(f"http://127.0.0.1:{port}/metrics")["kvtier_tier_open,tier=memory"] == 1


def test_a_silent_client_is_cut_off_and_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "_SILENCE_S", 0.1)
    with serve_metrics(list, port=0) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0]))
        with socket.create_connection(address, timeout=10) as silent:
            silent.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert scrape(url) == {}
            assert silent.recv(1) == b""


def test_a_missing_extra_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("prometheus_client"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'kvtier-sdk\[metrics\]'"):
        serve_metrics(list, port=0).__enter__()
