"""The configuration in SGLang's ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier_sdk import ConfigError, TierSpec
from kvtier_sdk.engine import AdapterOptions, Place

_EXTRA_CONFIG = Place("hicache-storage-backend-extra-config")
_TIER = "tier"
#: SGLang's switch for the interface that passes indices into its host pool.
_ZERO_COPY = "interface_v1"


def read_config(extra_config: Mapping[str, Any] | None) -> tuple[TierSpec, AdapterOptions, bool]:
    """Return the tier, the adapter's options, and true if SGLang passes page indices."""
    extra_config = extra_config or {}
    given = extra_config.get(_TIER)
    if given is None:
        raise ConfigError(
            f'{_EXTRA_CONFIG} option {_TIER!r} is missing: "{_TIER}": "file:///data/kv"'
        )
    tier, options = AdapterOptions.read(given, _EXTRA_CONFIG.at(_TIER))
    return tier, options, bool(extra_config.get(_ZERO_COPY))
