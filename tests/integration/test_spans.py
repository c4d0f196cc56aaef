from __future__ import annotations

import time
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.live import CHUNK_BYTES, live

from kvtier_sdk import RequestContext, make_offload_key

KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(1, 5)]
TRACE_ID, SPAN_ID = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331
HEADERS = {"traceparent": f"00-{TRACE_ID:032x}-{SPAN_ID:016x}-01", "tracestate": "shop=1"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    # Patch a private variable, because other tests run in this process, and a process can set its
    # provider only once.
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def told(span: ReadableSpan) -> dict[str, object]:
    attributes = span.attributes or {}
    return {name.removeprefix("kvtier."): value for name, value in attributes.items()}


def test_each_job_is_a_span_in_the_trace_of_its_request(
    tmp_path: Path, exporter: InMemorySpanExporter, runner: str
) -> None:
    before_ns = time.time_ns()
    url = f"file://{tmp_path}/kv?runner={runner}&compress=never"
    with live([url]) as engine:
        engine.store(engine.begin("writer"), *KEYS[:3])
    with live([url]) as engine:
        reader = RequestContext("reader", trace_headers=HEADERS)
        engine.manager.on_new_request(reader)
        assert engine.settle(reader, *KEYS) == ["HIT"] * 3 + ["MISS"]
    store, lookup, load = exporter.get_finished_spans()
    assert [one.name for one in (store, lookup, load)] == [
        *("kvtier.store", "kvtier.lookup", "kvtier.load")
    ]
    size = 3 * CHUNK_BYTES
    common = {"tier": "file", "failed_chunks": 0}
    assert told(store) == common | {
        "request_id": "writer",
        "chunks": 3,
        "stored_chunks": 3,
        "bytes": size,
    }
    assert told(lookup) == common | {
        "request_id": "reader",
        "chunks": 4,
        "found_chunks": 3,
        "bytes": 0,
    }
    assert told(load) == common | {
        "request_id": "reader",
        "chunks": 3,
        "loaded_chunks": 3,
        "bytes": size,
    }
    assert store.parent is None
    for span in (lookup, load):
        assert span.parent is not None
        assert (span.parent.trace_id, span.parent.span_id) == (TRACE_ID, SPAN_ID)
        assert span.parent.trace_state["shop"] == "1"
    times = [(one.start_time or 0, one.end_time or 0) for one in (store, lookup, load)]
    assert before_ns < times[0][0]
    assert all(start < end <= time.time_ns() for start, end in times)
    assert times == sorted(times)


def test_a_failed_chunk_makes_the_span_an_error(
    tmp_path: Path, exporter: InMemorySpanExporter
) -> None:
    url = f"file://{tmp_path}/kv?compress=never"
    with live([url]) as engine:
        engine.store(engine.begin("writer"), *KEYS[:2])
    damaged, *_ = (path for path in (tmp_path / "kv").rglob("*") if path.stat().st_size > 4096)
    with damaged.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    exporter.clear()
    with live([url]) as engine:
        assert sorted(engine.settle(engine.begin("reader"), *KEYS[:2])) == ["HIT", "MISS"]
    lookup, load = exporter.get_finished_spans()
    assert lookup.status.is_unset
    assert not load.status.is_ok
    assert "file load: " in str(load.status.description)
    assert (told(load)["loaded_chunks"], told(load)["failed_chunks"]) == (1, 1)
