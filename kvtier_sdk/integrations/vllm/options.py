"""The options that stand in vLLM's ``kv_connector_extra_config``. Ours are strict."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field

from kvtier_sdk.config.location_conflicts import location_conflicts
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.integrations.vllm.plugin import TIER_TYPE
from kvtier_sdk.options.model import (
    StrictModel,
    nearest,
    option_path,
    validate_options,
)
from kvtier_sdk.options.units import Flag, Seconds
from kvtier_sdk.tiering import TieringConfig

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
# Keys of a tier's entry that vLLM's own manager keeps for itself.
_ENGINE_TIER_KEYS = frozenset({"type", "module_path", "backpressure"})
#: What ``type`` says where our class is named instead of the registered type.
CLASS_TYPE = "KVTierSecondaryTier"

_WHERE = "kv_connector_extra_config"
_TIERS = "secondary_tiers"
#: What vLLM calls options of a :class:`TieringConfig`.
_ENGINE_NAMES = {
    "pool_bytes": "cpu_bytes_to_use",
    "policy": "eviction_policy",
    "tiers": _TIERS,
}


class GuestOptions(StrictModel):
    """Options of one of our tiers under vLLM's manager, beside its backend's and every tier's.

    Attributes:
        verify: false switches digests off; for measurements and tests only.
        model_revision: what tells this model from others of its name.
        shutdown_timeout_s: for draining the tier, and again for closing it.
    """

    verify: Flag = True
    model_revision: str | None = None
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")


@dataclass(frozen=True, slots=True)
class SecondaryTierEntry:
    """One of our tiers under vLLM's own manager: an entry of its ``secondary_tiers``.

    Attributes:
        tier: the tier.
        options: how it runs here.
    """

    tier: TierSpec
    options: GuestOptions

    @classmethod
    def read(cls, options: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> Self:
        """Read an entry as vLLM hands it over.

        Args:
            options: the entry, without the keys that vLLM keeps for itself.
            entries: all of ``secondary_tiers``, this one among them.

        Returns:
            The validated entry.

        Raises:
            ConfigError: as for :meth:`read_all`.
            BackendError: the backend cannot be found or loaded.
        """
        read = cls.read_all(entries)
        path = next((path for path, entry in _ours(entries).items() if entry == options), None)
        return read[path] if path else cls._read(options, _TIERS)

    @classmethod
    def read_all(cls, entries: Sequence[Mapping[str, Any]]) -> dict[str, Self]:
        """Read the entries that are ours.

        Args:
            entries: all of ``secondary_tiers``; others are vLLM's to check.

        Returns:
            Path, ``secondary_tiers[0]``, to validated entry.

        Raises:
            ConfigError: an option is wrong, or two entries have one name or clash otherwise.
            BackendError: a backend cannot be found or loaded.
        """
        read = {path: cls._read(entry, path) for path, entry in _ours(entries).items()}
        tiers = {path: entry.tier for path, entry in read.items()}
        names: set[str] = set()
        for path, tier in tiers.items():
            if tier.name in names:
                raise ConfigError(
                    f"{_WHERE}: option '{path}.name': two tiers are named {tier.name!r}; name "
                    f"one of them, for example '{tier.name}-2'"
                )
            names.add(tier.name)
        for path, fault in location_conflicts(tiers):
            raise ConfigError(f"{_WHERE}: option {path!r}: {tiers[path].name!r} {fault}")
        return read

    @classmethod
    def _read(cls, entry: Mapping[str, Any], path: str) -> Self:
        names = GuestOptions.option_names()
        guest = {name: value for name, value in entry.items() if name in names}
        own = {name: value for name, value in entry.items() if name not in names}
        return cls(
            TierSpec.from_options({"type": TIER_TYPE, **own}, where=_WHERE, path=path),
            validate_options(GuestOptions, guest, where=_WHERE, path=path),
        )


class EngineOptions(StrictModel):
    """Options of our own manager under vLLM, beside those of a :class:`TieringConfig`.

    Attributes:
        copies: who copies between the device and the host pool: ``kvtier``, ``vllm``, or
            ``auto``: vLLM where it can, which is not on a CPU.
        model_revision: what tells this model from others of its name.
    """

    copies: Literal["auto", "kvtier", "vllm"] = "auto"
    model_revision: str | None = None


@dataclass(frozen=True, slots=True)
class SpecOptions:
    """``kv_connector_extra_config`` for our own manager, validated.

    Attributes:
        config: host pool, policies and tiers.
        engine: the rest.
    """

    config: TieringConfig
    engine: EngineOptions

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> Self:
        """Read ``kv_connector_extra_config``.

        Args:
            extra_config: as configured.

        Returns:
            Our part of it, validated. Backends and policies in it have been imported.

        Raises:
            ConfigError: an option is wrong.
        """
        own = {key: value for key, value in extra_config.items() if key not in ENGINE_KEYS}
        of_engine = EngineOptions.option_names()
        _check_names(own, [*of_engine, *_config_names(), *ENGINE_KEYS])
        ours = {theirs: ours for ours, theirs in _ENGINE_NAMES.items()}
        config = {ours.get(key, key): value for key, value in own.items() if key not in of_engine}
        engine = {key: value for key, value in own.items() if key in of_engine}
        if "pool_bytes" not in config:
            raise ConfigError(
                f"{_WHERE}: option 'cpu_bytes_to_use' is missing; it says how big the host pool "
                "is, for example '4GiB'"
            )
        try:
            tiering = TieringConfig.from_dict(config, where=_WHERE)
        except ConfigError as error:
            raise ConfigError(in_vllms_names(str(error))) from error
        return cls(tiering, validate_options(EngineOptions, engine, where=_WHERE))


def _ours(entries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Our entries by their paths, without the keys that vLLM keeps for itself."""
    return {
        option_path(_TIERS, index): {
            key: value for key, value in entry.items() if key not in _ENGINE_TIER_KEYS
        }
        for index, entry in enumerate(entries)
        if entry.get("type") in (TIER_TYPE, CLASS_TYPE)
    }


def _config_names() -> list[str]:
    """Options of a :class:`TieringConfig` as they are called here; an engine knows the others."""
    known_to_engine = ("slots", "chunk_bytes")
    names = TieringConfig.option_names()
    return [_ENGINE_NAMES.get(name, name) for name in names if name not in known_to_engine]


def _check_names(options: Iterable[str], known: Sequence[str]) -> None:
    mistakes = [
        f"{_WHERE}: unknown option {name!r}; {nearest(name, known, 'allowed')}"
        for name in options
        if name not in known
    ]
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def in_vllms_names(message: str) -> str:
    """A complaint about a :class:`TieringConfig` with its options called as vLLM's users do."""
    for ours, theirs in _ENGINE_NAMES.items():
        message = re.sub(rf"'{ours}\b", f"'{theirs}", message)
    return message
