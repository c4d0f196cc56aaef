"""Builds and reads vLLM's ``kv_transfer_config`` without importing vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from kvtier_sdk import ConfigError, TieringConfig
from kvtier_sdk.engine import Place, StrictModel, nearest, parse_bytes, validate_options
from kvtier_vllm import HOMES
from kvtier_vllm.options import (
    CLASS_TYPE,
    EXTRA_CONFIG,
    SecondaryTierEntry,
    SpecOptions,
)
from kvtier_vllm.plugin import TIER_TYPE

#: The directory in which vLLM's processes share the host pool.
POOL_DIRECTORY = "/dev/shm"
#: vLLM's connector that accepts specs and tiers from other packages.
CONNECTOR = "OffloadingConnector"
_HOST_SPEC = "KVTierOffloadingSpec"
_CPU_SPEC = "KVTierCPUTieringSpec"
#: ``OUR_SPECS`` are kvtier's own. ``GUEST_SPECS`` use vLLM's manager and accept kvtier's tiers.
OUR_SPECS = (_HOST_SPEC, _CPU_SPEC)
GUEST_SPECS = ("TieringOffloadingSpec", _CPU_SPEC)

_Role = Literal["kv_producer", "kv_consumer", "kv_both"]


class _TransferConfig(StrictModel):
    """The fields of vLLM's ``KVTransferConfig``, to check them where vLLM is not installed."""

    kv_connector: str
    engine_id: str | None = None
    kv_buffer_device: str = ""
    kv_role: _Role | None = None
    kv_port: int = 0
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool = False
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.kv_role is None:
            raise ValueError(f"option 'kv_role' is missing; allowed: {', '.join(get_args(_Role))}")
        return self


def is_transfer_config(options: Mapping[str, Any]) -> bool:
    """Return true for vLLM's transfer configuration, false for kvtier's own options."""
    return "kv_connector" in options or EXTRA_CONFIG.where in options


def make_transfer_config(
    tiers: Sequence[str],
    pool: str,
    *,
    our_manager: bool,
    model_revision: str | None = None,
    services: Mapping[str, Any],
) -> dict[str, Any]:
    """Build the argument of ``vllm serve --kv-transfer-config``; only our manager uses services."""
    revision = {} if model_revision is None else {"model_revision": model_revision}
    extra: dict[str, Any]
    if our_manager:
        extra = {
            "spec_name": _HOST_SPEC,
            "spec_module_path": __package__,
            "cpu_bytes_to_use": pool,
            "secondary_tiers": list(tiers),
            **services,
            **revision,
        }
    else:
        try:
            pool_bytes = parse_bytes(pool)  # vLLM accepts only a number
        except ValueError as error:
            raise ConfigError(f"{EXTRA_CONFIG.at('cpu_bytes_to_use')}: {error}") from None
        extra = {
            "spec_name": GUEST_SPECS[0],
            "cpu_bytes_to_use": pool_bytes,
            "secondary_tiers": [{"type": TIER_TYPE, "url": url, **revision} for url in tiers],
        }
    return {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        EXTRA_CONFIG.where: extra,
    }


def read_transfer_config(options: Mapping[str, Any], *, where: str) -> TieringConfig:
    """Read the argument of ``vllm serve --kv-transfer-config``."""
    place = Place(where)
    connector = options.get("kv_connector")
    if connector != CONNECTOR:
        raise ConfigError(
            f"{place.at('kv_connector')} is {connector!r}; kvtier is used through {CONNECTOR!r}"
        )
    validate_options(_TransferConfig, options, place)
    inside = place.at(EXTRA_CONFIG.where)
    extra = inside.table(options.get(EXTRA_CONFIG.where, {}))
    spec = extra.get("spec_name")
    try:
        if spec in OUR_SPECS:
            _check_module(extra.get("spec_module_path"), EXTRA_CONFIG.at("spec_module_path"), spec)
        if spec == _HOST_SPEC:
            return SpecOptions.from_dict(extra, where=EXTRA_CONFIG.where).config
        if spec in GUEST_SPECS:
            return _read_guests(extra)
    except ConfigError as error:
        lines = str(error).splitlines()
        raise ConfigError("\n".join(f"{where}: {line}" for line in lines)) from None
    known = nearest(str(spec), [_HOST_SPEC, *GUEST_SPECS], "allowed")
    raise ConfigError(f"{inside.at('spec_name')} is {spec!r}; {known}")


def _read_guests(extra: Mapping[str, Any]) -> TieringConfig:
    entries = EXTRA_CONFIG.at("secondary_tiers").entries(extra.get("secondary_tiers", []))
    tables = {place: place.table(entry) for place, entry in entries.items()}
    for place, entry in tables.items():
        if entry.get("type") == CLASS_TYPE:
            _check_module(entry.get("module_path"), place.at("module_path"), CLASS_TYPE)
    pool_bytes = _read_pool_bytes(extra.get("cpu_bytes_to_use"))
    guests = SecondaryTierEntry.read_all(list(tables.values())).values()
    if not guests:
        raise ConfigError(
            f"{EXTRA_CONFIG} no entry of 'secondary_tiers' has \"type\": {TIER_TYPE!r}; "
            "kvtier is not used"
        )
    tiers = tuple(guest.tier for guest in guests)
    return TieringConfig.model_construct(pool_bytes=pool_bytes, tiers=tiers)


def _check_module(module: object, place: Place, class_name: str) -> None:
    """Raise :class:`ConfigError` if vLLM would not find the class in ``module``."""
    # The module is not imported, because kvtier's modules need vLLM, which may be missing here. A
    # module of another package is accepted if it exists, because it may re-export kvtier's class.
    if isinstance(module, str) and _may_hold(module, class_name):
        return
    fault = f"is {module!r}, where there is no {class_name}"
    if module is None:
        fault = "is missing"
    raise ConfigError(f"{place} {fault}; write {__package__!r}")


def _may_hold(module: str, class_name: str) -> bool:
    if module.partition(".")[0] in (__package__, "kvtier_sdk"):
        return module in (__package__, f"{__package__}.{HOMES[class_name]}")
    # Ignore all errors, because find_spec imports parent packages, which may raise any error.
    with suppress(Exception):
        return find_spec(module) is not None
    return False


def _read_pool_bytes(value: Any) -> int:
    """Read the size of vLLM's own pool as vLLM does: with ``int``, which accepts no units."""
    place = EXTRA_CONFIG.at("cpu_bytes_to_use")
    if value is None:
        raise ConfigError(f"{place} is missing")
    with suppress(TypeError, ValueError, OverflowError):
        if (pool_bytes := int(value)) > 0:
            return pool_bytes
    advice = f"for example {4 << 30}"
    with suppress(ValueError):
        advice = str(parse_bytes(value) or advice)
    raise ConfigError(f"{place} is {value!r}, and vLLM takes bytes only; write {advice}")
