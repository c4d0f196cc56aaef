"""Mistakes that can be known before vLLM starts a worker and loads a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierTimeoutError, TierUnavailableError
from kvtier_sdk.integrations.vllm.model_revision import model_facts
from kvtier_sdk.integrations.vllm.options import CLASS_TYPE, EXTRA_CONFIG
from kvtier_sdk.integrations.vllm.plugin import TIER_TYPE
from kvtier_sdk.integrations.vllm.transfer_config import (
    CONNECTOR,
    GUEST_SPECS,
    OUR_SPECS,
    read_transfer_config,
)
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening.maintenance import open_for_maintenance
from kvtier_sdk.pool.limits import total_memory_bytes
from kvtier_sdk.pool.memory import check_room
from kvtier_sdk.types import Capability, Locality

_SHARED_MEMORY = Path("/dev/shm")
_WHERE = "kv_transfer_config"
#: How long a store may take that the engine can start without.
_PATIENCE_S = 5.0


def check_engine(transfer: Mapping[str, Any], model: str, hub_cache: Path) -> None:
    """Check what of an engine's configuration is ours; do nothing if none of it is.

    Stores over the network are contacted, and nothing in them is changed.

    Args:
        transfer: vLLM's ``kv_transfer_config``.
        model: the model's name or path.
        hub_cache: the directory of the hub's files.

    Raises:
        ConfigError: an option is wrong, there is no room for the host pool, or the revision of the
            model cannot be determined.
        TierError: a store refuses the credentials, or cannot be reached and is required.
    """
    extra = transfer.get(EXTRA_CONFIG.where)
    if transfer.get("kv_connector") != CONNECTOR or not isinstance(extra, Mapping):
        return
    if not _is_ours(extra):
        return
    config = read_transfer_config(transfer, where=_WHERE)
    size = config.pool_bytes or 0
    # A number is bytes, a share of the memory a fraction.
    size_bytes = size if isinstance(size, int) else int(size * total_memory_bytes())
    check_room(size_bytes, _SHARED_MEMORY)
    for options in [extra] if extra["spec_name"] not in GUEST_SPECS else _our_tiers(extra):
        model_facts(model, hub_cache, options.get("model_revision"))
    for spec in config.tiers:
        _check_store(spec)


def _check_store(spec: TierSpec) -> None:
    """Open a tier over the network as a tool does, and raise what would end the engine's start."""
    tier_class = spec.tier_class
    # The rules for tools came with NAMESPACES. Without them a tier would write.
    keeps_rules = Capability.NAMESPACES in tier_class.capabilities
    if not keeps_rules or tier_class.locality is not Locality.REMOTE:
        return
    required, deadline_s = spec.runner.required, spec.runner.open_deadline_s
    timeout_s = deadline_s if required else min(deadline_s, _PATIENCE_S)
    try:
        with open_for_maintenance(spec, Namespace({}), timeout_s=timeout_s):
            pass
    except (TierUnavailableError, TierTimeoutError):
        # The engine starts without it, and says so.
        if required:
            raise


def _is_ours(extra: Mapping[str, Any]) -> bool:
    """Return true if a manager or a tier is meant to be ours, even if its name is misspelt."""
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
