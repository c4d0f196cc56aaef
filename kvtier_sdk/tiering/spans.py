"""Creates an OpenTelemetry span for each finished lookup, load and store of a tier."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, Final

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.runner.jobs import Job, JobResult, Operation, Verdict

#: Names the span attribute that counts successful chunks, such as ``kvtier.found_chunks``.
_DONE: Final = {Operation.LOOKUP: "found", Operation.LOAD: "loaded", Operation.STORE: "stored"}


def span_maker(tier: str, clock: Clock) -> Callable[[Job, JobResult], None] | None:
    """Return a function that creates spans; ``None`` without a configured OpenTelemetry SDK."""
    # A process that uses OpenTelemetry has imported its API, so kvtier need not require the API.
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None or isinstance(api.get_tracer_provider(), api.ProxyTracerProvider):
        return None
    tracer = api.get_tracer("kvtier")
    w3c = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
    propagator = w3c.TraceContextTextMapPropagator()

    def make_span(job: Job, result: JobResult) -> None:
        done = _DONE.get(job.operation)
        if done is None:
            return
        verdicts, now_s = result.verdicts, clock.now_s()
        start_s = clock.wall_s() - now_s + job.handed_s
        # The result of a job that the client ended itself, such as an overdue job, has no duration.
        end_s = start_s + (result.duration_s or now_s - job.handed_s)
        succeeded = verdicts.count(Verdict.OK)
        absent = verdicts.count(Verdict.NOT_FOUND) if done == "found" else 0
        span = tracer.start_span(
            f"kvtier.{job.operation.value}",
            # Without headers the context is empty, so the span is a root.
            propagator.extract(job.request.trace_headers),
            attributes={
                "kvtier.tier": tier,
                "kvtier.request_id": job.request.request_id,
                "kvtier.chunks": len(verdicts),
                f"kvtier.{done}_chunks": succeeded,
                "kvtier.failed_chunks": len(verdicts) - succeeded - absent,
                "kvtier.bytes": result.moved_bytes,
            },
            start_time=int(start_s * 1e9),
        )
        if result.error is not None:
            span.set_status(api.StatusCode.ERROR, result.error)
        span.end(int(end_s * 1e9))

    return make_span
