"""The entry point that vLLM loads in every one of its processes."""

from __future__ import annotations

import logging

#: The type of a secondary tier that vLLM hands to us.
TIER_TYPE = "kvtier"

_log = logging.getLogger("kvtier.vllm")


def register() -> None:
    """Make ``"type": "kvtier"`` known to vLLM's factory of secondary tiers.

    May be called any number of times, in any process, and never raises: vLLM does not catch what
    a plugin raises, and an engine that uses none of this must start all the same.
    """
    try:
        from kvtier_sdk.integrations.vllm import compat

        compat.warn_if_untried()
        compat.register_tier(TIER_TYPE, __package__, "KVTierSecondaryTier")
    except Exception as error:
        _log.warning(
            "the tier type %r could not be made known to vLLM (%s: %s); tiers of this type will "
            "be unknown to it",
            TIER_TYPE,
            type(error).__name__,
            error,
        )
