"""An operator's whole ``kv_transfer_config``, read without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kvtier_sdk.config import kind_of, nearest
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.integrations.vllm.options import GuestEntry, HostOptions
from kvtier_sdk.integrations.vllm.plugin import TIER_TYPE
from kvtier_sdk.tiering import TieringConfig
from kvtier_sdk.units import parse_bytes

_CONNECTOR = "OffloadingConnector"
_EXTRA = "kv_connector_extra_config"
#: The spec whose manager is ours, and those whose manager is vLLM's.
_HOST_SPEC = "KVTierOffloadingSpec"
_GUEST_SPECS = ("TieringOffloadingSpec", "KVTierCPUTieringSpec")


def is_transfer_config(options: Mapping[str, Any]) -> bool:
    """Whether options are vLLM's rather than ours."""
    return "kv_connector" in options or _EXTRA in options


def read_transfer_config(options: Mapping[str, Any], *, where: str) -> TieringConfig:
    """Read what ``vllm serve --kv-transfer-config`` is given.

    Args:
        options: the whole of it.
        where: what it stands in, with which each complaint begins.

    Returns:
        The host pool and those tiers that are ours, validated; under vLLM's own manager the
        other tiers are vLLM's to check.

    Raises:
        ConfigError: an option is wrong, or nothing in it is ours.
    """
    connector = options.get("kv_connector")
    if connector != _CONNECTOR:
        raise ConfigError(
            f"{where}: option 'kv_connector' is {connector!r}; kvtier is used through "
            f"{_CONNECTOR!r}"
        )
    extra = options.get(_EXTRA, {})
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"{where}: option '{_EXTRA}' should be a table of options, not {kind_of(extra)}"
        )
    spec = extra.get("spec_name")
    try:
        if spec == _HOST_SPEC:
            return HostOptions.read(extra).config
        if spec in _GUEST_SPECS:
            return _read_guests(extra)
    except (ConfigError, BackendError) as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from error
    known = nearest(str(spec), [_HOST_SPEC, *_GUEST_SPECS], "allowed")
    raise ConfigError(f"{where}: option '{_EXTRA}.spec_name' is {spec!r}; {known}")


def _read_guests(extra: Mapping[str, Any]) -> TieringConfig:
    entries = extra.get("secondary_tiers", [])
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{_EXTRA}: option 'secondary_tiers' should be a list of tables")
    pool_bytes = _read_pool_bytes(extra.get("cpu_bytes_to_use"))
    guests = GuestEntry.read_all(entries)
    if not guests:
        raise ConfigError(
            f"{_EXTRA}: no entry of 'secondary_tiers' has \"type\": {TIER_TYPE!r}; nothing is ours"
        )
    specs = [guest.tier for guest in guests.values()]
    return TieringConfig.from_dict({"pool_bytes": pool_bytes, "tiers": specs}, where=_EXTRA)


def _read_pool_bytes(value: Any) -> int:
    """What vLLM makes of the size of its own pool: it calls ``int``, which knows no units."""
    if value is None:
        raise ConfigError(f"{_EXTRA}: option 'cpu_bytes_to_use' is missing")
    with suppress(TypeError, ValueError, OverflowError):
        if (pool_bytes := int(value)) > 0:
            return pool_bytes
    advice = f"for example {4 << 30}"
    with suppress(ValueError):
        advice = str(parse_bytes(value) or advice)
    raise ConfigError(
        f"{_EXTRA}: option 'cpu_bytes_to_use' is {value!r}, and vLLM takes bytes only; "
        f"write {advice}"
    )
