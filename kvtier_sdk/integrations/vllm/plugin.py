"""The entry point that vLLM loads in every one of its processes."""

from __future__ import annotations

import logging

#: The type of kvtier's secondary tiers in vLLM's configuration.
TIER_TYPE = "kvtier"

_log = logging.getLogger("kvtier.vllm")


def register() -> None:
    """Register ``"type": "kvtier"`` with vLLM's factory of secondary tiers.

    It may be called any number of times, in any process. It never raises: vLLM does not catch a
    plugin's errors, and an engine that does not use kvtier must still start.
    """
    try:
        from kvtier_sdk.integrations.vllm import compat

        compat.warn_if_untried()
        compat.register_tier(TIER_TYPE, __package__, "KVTierSecondaryTier")
    except Exception as error:
        _log.warning(
            "the tier type %r could not be registered with vLLM (%s: %s); vLLM will refuse tiers "
            "of this type",
            TIER_TYPE,
            type(error).__name__,
            error,
        )
