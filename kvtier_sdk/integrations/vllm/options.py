"""The options that stand in vLLM's ``kv_connector_extra_config``. Ours are strict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field

from kvtier_sdk.config import StrictModel, validate_options
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.integrations.vllm.plugin import TIER_TYPE
from kvtier_sdk.tier_spec import TierSpec, with_unique_names
from kvtier_sdk.units import Bytes, Flag, Seconds

#: Keys of ``kv_connector_extra_config`` that vLLM's connector reads, whatever the spec.
ENGINE_KEYS = (
    "spec_name",
    "spec_module_path",
    "block_size",
    "blocks_per_chunk",
    "offload_prompt_only",
    "self_describing_kv_events",
    "canonical_layout",
    "sync_load_budget_bytes",
)
#: Keys of a tier's entry that vLLM's own manager keeps for itself.
ENGINE_TIER_KEYS = frozenset({"type", "module_path", "backpressure"})
#: What ``type`` says where our class is named instead of the registered type.
CLASS_TYPE = "KVTierSecondaryTier"


class CommonOptions(StrictModel):
    """What can be set in either way of running under vLLM.

    Attributes:
        verify: false switches digests off; for measurements and tests only.
        model_revision: what tells this model from others of its name.
        shutdown_timeout_s: for draining a tier, and again for closing it.
    """

    verify: Flag = True
    model_revision: str | None = None
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")


@dataclass(frozen=True, slots=True)
class GuestEntry:
    """One of our tiers under vLLM's own manager: an entry of its ``secondary_tiers``.

    Attributes:
        tier: the tier.
        options: how it runs here.
    """

    tier: TierSpec
    options: CommonOptions

    @classmethod
    def read(cls, entry: Mapping[str, Any], where: str) -> Self:
        """Read an entry.

        Args:
            entry: as configured, with or without the keys that vLLM keeps for itself.
            where: its path, with which each complaint begins.

        Returns:
            The validated entry.

        Raises:
            ConfigError: an option is wrong.
            BackendError: the backend cannot be found or loaded.
        """
        own = {key: value for key, value in entry.items() if key not in ENGINE_TIER_KEYS}
        common = {key: own.pop(key) for key in CommonOptions.option_names() if key in own}
        if "backend" not in own and "url" not in own:
            raise ConfigError(
                f'{where}: no backend is named; write for example "url": "file:///data/kv", '
                'or "backend": "file" and its options'
            )
        return cls(
            TierSpec.from_options({"type": TIER_TYPE, **own}, where=where),
            validate_options(CommonOptions, common, where=where),
        )


def check_guest_names(entries: Sequence[Mapping[str, Any]]) -> None:
    """Check that no two of our tiers under vLLM's manager have one name.

    Args:
        entries: all of ``secondary_tiers``.

    Raises:
        ConfigError: two have one name.
    """
    with_unique_names(
        GuestEntry.read(entry, tier_path(index)).tier
        for index, entry in enumerate(entries)
        if entry.get("type") in (TIER_TYPE, CLASS_TYPE)
    )


class OffloadOptions(CommonOptions):
    """Options of our own manager under vLLM.

    Attributes:
        host_bytes: size of the host pool, of all workers of a replica together.
        secondary_tiers: entries or URLs, in the order in which tiers are asked.
        eviction_policy: which chunk leaves a full host pool.
        copies: who copies between the device and the host pool: ``kvtier``, ``vllm``, or
            ``auto``: vLLM where it can, which is not on a CPU.
    """

    host_bytes: Bytes = Field(alias="cpu_bytes_to_use", gt=0)
    secondary_tiers: tuple[dict[str, Any] | str, ...] = ()
    eviction_policy: str = "lru"
    copies: Literal["auto", "kvtier", "vllm"] = "auto"

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``.

        Args:
            extra_config: as configured.

        Returns:
            Our part of it, validated.

        Raises:
            ConfigError: an option is wrong.
        """
        own = {key: value for key, value in extra_config.items() if key not in ENGINE_KEYS}
        where = "kv_connector_extra_config"
        return validate_options(cls, own, where=where, also_known=ENGINE_KEYS)

    def tiers(self) -> list[TierSpec]:
        """The secondary tiers.

        Raises:
            ConfigError: an option of theirs is wrong, or two have one name.
            BackendError: a backend cannot be found or loaded.
        """
        return with_unique_names(
            TierSpec.from_options(
                {"url": entry} if isinstance(entry, str) else entry, where=tier_path(index)
            )
            for index, entry in enumerate(self.secondary_tiers)
        )


def tier_path(index: int) -> str:
    """The path of a tier's entry, for messages."""
    return f"secondary_tiers[{index}]"
