"""The entry point that vLLM loads in each of its processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvtier_sdk import KVTierError

#: The type of kvtier's secondary tiers in vLLM's configuration.
TIER_TYPE = "kvtier"

_log = logging.getLogger("kvtier.vllm")


def register() -> None:
    """Register ``"type": "kvtier"`` with vLLM's factory of secondary tiers."""
    # vLLM does not catch a plugin's errors, and engines without kvtier must still start.
    try:
        from kvtier_vllm import compat
        from kvtier_vllm.engine_log import join_engine_log

        join_engine_log()
        compat.warn_if_untried()
        compat.register_tier(TIER_TYPE, __package__, "KVTierSecondaryTier")
        compat.check_engine_configs(_check)
    except Exception as error:
        _log.warning(
            "the tier type %r could not be registered with vLLM (%s: %s); vLLM will refuse tiers "
            "of this type",
            TIER_TYPE,
            type(error).__name__,
            error,
        )


def _check(vllm_config: Any) -> None:
    transfer = vllm_config.kv_transfer_config
    from huggingface_hub.constants import HF_HUB_CACHE

    from kvtier_vllm import compat
    from kvtier_vllm.early_check import check_engine
    from kvtier_vllm.engine_log import join_engine_log

    if transfer is None or not compat.runs_here(vllm_config):
        return
    # Join vLLM's log again, because vLLM has configured the log after register() joined it.
    join_engine_log()
    options = {
        name: getattr(transfer, name)
        for name in ("kv_connector", "kv_role", "kv_connector_extra_config")
    }
    try:
        parallel = vllm_config.parallel_config
        first = parallel.data_parallel_index
        ranks = range(first, first + parallel.data_parallel_size_local)
        check_engine(options, vllm_config.model_config.model, Path(HF_HUB_CACHE), ranks)
    except KVTierError as error:
        if not compat.is_command():
            raise
        # Users of the command line need the message, not a traceback of vLLM's code.
        _log.error("%s", error)
        raise SystemExit(1) from None
