"""A check of a tier's store before an engine starts."""

from __future__ import annotations

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierTimeoutError, TierUnavailableError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening.maintenance import open_for_maintenance
from kvtier_sdk.types import Capability, Locality

#: The longest time to wait for a store that the engine can start without.
_PATIENCE_S = 5.0


def check_store(spec: TierSpec) -> None:
    """Contact a tier's store over the network, and raise errors that would end an engine's start.

    Nothing in the store is changed. A store on this machine is not checked, and neither is a store
    whose backend cannot open it without a change.

    Args:
        spec: the tier's specification.

    Raises:
        ConfigError: an option is wrong, or the tier cannot work with it.
        TierError: the store refuses the credentials, or cannot be reached and is required.
    """
    tier_class = spec.tier_class
    # A backend without NAMESPACES does not know the rules for maintenance, and might write.
    keeps_rules = Capability.NAMESPACES in tier_class.capabilities
    if not keeps_rules or tier_class.locality is not Locality.REMOTE:
        return
    required, deadline_s = spec.runner.required, spec.runner.open_deadline_s
    timeout_s = deadline_s if required else min(deadline_s, _PATIENCE_S)
    try:
        with open_for_maintenance(spec, Namespace({}), timeout_s=timeout_s):
            pass
    except (TierUnavailableError, TierTimeoutError):
        # The engine starts without a store that is not required, and logs that.
        if required:
            raise
