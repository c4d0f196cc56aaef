"""Options of a tier that an engine uses by itself, beside those of its backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from kvtier_sdk.options.model import StrictModel
from kvtier_sdk.options.units import Count, Seconds


class AdapterOptions(StrictModel):
    """Options of a tier under LMCache or SGLang, beside its backend's and every tier's.

    Attributes:
        namespace: further facts that must match for stored bytes to be reusable, name to plain
            value: ``{"revision": "v2"}``. Neither engine tells the model's revision.
        metrics_port: port of the metrics endpoint; none is served where it is absent. SGLang's rank
            *r* serves at this port plus *r*.
        metrics_host: address of the metrics endpoint.
        shutdown_timeout_s: time to drain each model's tier, and again to close it.
    """

    namespace: Mapping[str, Any] = Field(default_factory=dict)
    metrics_port: Count | None = Field(None, ge=1, le=65535)
    metrics_host: str = "127.0.0.1"
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")
