"""Tier entries as they stand in vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field

from kvtier_sdk.config import StrictModel, validate_options
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.integrations.vllm.plugin import TIER_TYPE
from kvtier_sdk.tier_spec import TierSpec, with_unique_names
from kvtier_sdk.units import Flag, Seconds

#: Keys of an entry that are vLLM's own, and those that it keeps for itself.
ENGINE_KEYS = frozenset({"type", "module_path", "backpressure"})
#: What ``type`` says where this package's class is named instead of the registered type.
CLASS_TYPE = "KVTierSecondaryTier"


class GuestOptions(StrictModel):
    """Options of a tier that runs under vLLM's own manager, beside its backend's and runner's.

    Attributes:
        verify: false switches digests off; for measurements and tests only.
        model_revision: what tells this model from others of its name.
        shutdown_timeout_s: for draining the tier and again for closing it.
    """

    verify: Flag = True
    model_revision: str | None = None
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")


@dataclass(frozen=True, slots=True)
class GuestEntry:
    """A validated entry of ``secondary_tiers`` whose type is ``kvtier``.

    Attributes:
        tier: the tier.
        options: how it runs here.
    """

    tier: TierSpec
    options: GuestOptions

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
        own = {key: value for key, value in entry.items() if key not in ENGINE_KEYS}
        guest = {key: own.pop(key) for key in GuestOptions.option_names() if key in own}
        if "backend" not in own and "url" not in own:
            raise ConfigError(
                f'{where}: names no backend; add for example \'"url": "file:///data/kv"\' or '
                f'\'"backend": "file", "root": "/data/kv"\''
            )
        options = validate_options(GuestOptions, guest, where=where)
        return cls(TierSpec.from_options({"type": TIER_TYPE, **own}, where=where), options)


def check_names(entries: Sequence[Mapping[str, Any]]) -> None:
    """Check that no two of our tiers under vLLM's manager have one name.

    Args:
        entries: all of ``secondary_tiers``.

    Raises:
        ConfigError: two have one name.
    """
    with_unique_names(
        GuestEntry.read(entry, where_of(index)).tier
        for index, entry in enumerate(entries)
        if entry.get("type") in (TIER_TYPE, CLASS_TYPE)
    )


def where_of(index: int) -> str:
    """The path of an entry, for messages."""
    return f"secondary_tiers[{index}]"
