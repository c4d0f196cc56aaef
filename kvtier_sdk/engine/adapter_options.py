"""Reads a tier's options from an engine's configuration, and checks that the store can be used."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import ServiceOptions
from kvtier_sdk.errors import TierTimeoutError, TierUnavailableError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.pool import HostPool
from kvtier_sdk.pool.layout import ROW_ALIGNMENT
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.types import Capability, Locality

#: The maximum wait for a store that the engine does not require.
_PATIENCE_S = 5.0


class AdapterOptions(ServiceOptions):
    """An engine adapter's own options, which users write beside a tier's options."""

    @classmethod
    def read(cls, entry: object, place: Place) -> tuple[TierSpec, Self]:
        """Read a tier's URL or options table in an engine's configuration.

        Each error message begins with the ``place`` of the entry.

        Raises:
            ConfigError: an option is wrong or missing.
            BackendError: the backend cannot be found or loaded.
        """
        options = place.table({"url": entry} if isinstance(entry, str) else entry)
        own = cls.take_from(options)
        spec = TierSpec.from_options(options, where=place.where, path=place.path)
        return spec, validate_options(cls, own, place)


def check_store(spec: TierSpec) -> None:
    """Contact the store of ``spec`` to find errors that would prevent an engine's start.

    The check changes nothing. It skips local stores, and backends that may write on opening.

    Raises:
        ConfigError: an option is wrong, or the tier cannot work with an option's value.
        TierError: the store refuses the credentials, or the store is required and unreachable.
    """
    tier_class = spec.tier_class
    # Only a backend with NAMESPACES is known to write nothing when it is opened for maintenance.
    keeps_rules = Capability.NAMESPACES in tier_class.capabilities
    if not keeps_rules or tier_class.locality is not Locality.REMOTE:
        return
    required, deadline_s = spec.runner.required, spec.runner.open_deadline_s
    timeout_s = deadline_s if required else min(deadline_s, _PATIENCE_S)
    options = {"required": True, "open_deadline_s": timeout_s, "compress": "never"}
    spec = replace(spec, runner=spec.runner.model_copy(update=options))
    pool = HostPool(1, ROW_ALIGNMENT)
    runner = ThreadRunner(
        spec, namespace=Namespace({}), pool=pool, clock=SystemClock(), maintenance=True
    )
    try:
        runner.start()
    except (TierUnavailableError, TierTimeoutError):
        # The engine starts without an optional store, and logs the failure itself.
        if required:
            raise
    finally:
        runner.close(timeout_s)
        pool.close()
