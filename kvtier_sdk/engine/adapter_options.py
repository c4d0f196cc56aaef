"""The entry of a tier under an engine's own manager: a backend's options, and a few more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.options.model import StrictModel, validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.units import Count, Seconds


class AdapterOptions(StrictModel):
    """Options of a tier under an engine's own manager, besides its backend's and every tier's.

    Attributes:
        namespace: further facts that must match for stored bytes to be reusable, name to plain
            value: ``{"revision": "v2"}``.
        metrics_port: port of the metrics endpoint; without it none is served.
        metrics_host: address of the metrics endpoint.
        shutdown_timeout_s: seconds to drain each model's tier, and again to close it.
    """

    namespace: Mapping[str, Any] = Field(default_factory=dict)
    metrics_port: Count | None = Field(None, ge=1, le=65535)
    metrics_host: str = "127.0.0.1"
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")

    @classmethod
    def read(cls, entry: object, place: Place) -> tuple[TierSpec, Self]:
        """Read a tier's entry in an engine's configuration.

        Args:
            entry: a URL, or a table with the tier's options and these.
            place: the entry's place; each error message begins with it.

        Returns:
            The tier's specification, and these options.

        Raises:
            ConfigError: an option is wrong or missing.
            BackendError: the backend cannot be found or loaded.
        """
        options = place.table({"url": entry} if isinstance(entry, str) else entry)
        own = cls.take_from(options)
        spec = TierSpec.from_options(options, where=place.where, path=place.path)
        return spec, validate_options(cls, own, place)
