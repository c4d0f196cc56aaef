"""Checks an engine's configuration before vLLM starts a worker and loads a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_sdk import HostPool, PoolLayout
from kvtier_sdk.engine import check_services, check_store, pool_size_bytes
from kvtier_vllm.model_revision import model_facts
from kvtier_vllm.options import CLASS_TYPE, EXTRA_CONFIG
from kvtier_vllm.plugin import TIER_TYPE
from kvtier_vllm.transfer_config import (
    CONNECTOR,
    GUEST_SPECS,
    OUR_SPECS,
    POOL_DIRECTORY,
    read_transfer_config,
)

_WHERE = "kv_transfer_config"


def check_engine(
    transfer: Mapping[str, Any], model: str, hub_cache: Path, ranks: range = range(1)
) -> None:
    """Check the configuration of this machine's data-parallel engines, if they use kvtier."""
    extra = transfer.get(EXTRA_CONFIG.where)
    if transfer.get("kv_connector") == "MultiConnector" and isinstance(extra, Mapping):
        inner = extra.get("connectors")
        for connector in inner if isinstance(inner, list) else ():
            if isinstance(connector, Mapping):
                check_engine(connector, model, hub_cache, ranks)
        return
    if transfer.get("kv_connector") != CONNECTOR or not isinstance(extra, Mapping):
        return
    if not _is_ours(extra):
        return
    config = read_transfer_config(transfer, where=_WHERE)
    HostPool.check(PoolLayout(1, pool_size_bytes(config)), directory=POOL_DIRECTORY)
    for options in [extra] if extra["spec_name"] not in GUEST_SPECS else _our_tiers(extra):
        model_facts(model, hub_cache, options.get("model_revision"))
    for rank in ranks:
        check_services(config.for_rank(rank))
    for spec in config.tiers:
        check_store(spec)


def _is_ours(extra: Mapping[str, Any]) -> bool:
    """Return true if the options name kvtier's manager or tier, even if the name is misspelt."""
    spec, module = str(extra.get("spec_name")), extra.get("spec_module_path")
    if spec in GUEST_SPECS:
        return any(_our_tiers(extra))
    if module is None:
        return "kvtier" in spec.lower()
    return spec in OUR_SPECS or str(module).startswith("kvtier")


def _our_tiers(extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    entries = extra.get("secondary_tiers")
    if not isinstance(entries, list):
        return
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("type") in (TIER_TYPE, CLASS_TYPE):
            yield entry
