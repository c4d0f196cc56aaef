"""kvtier's options in vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from kvtier_sdk import BytesOrShare, Flag, Seconds, TieringConfig, TierSpec
from kvtier_sdk.engine import EventOptions, Place, StrictModel, read_tiers, validate_options
from kvtier_vllm.plugin import TIER_TYPE

#: The ``type`` of an entry that uses our class's name instead of the registered type.
CLASS_TYPE = "KVTierSecondaryTier"

# Options of a tier's entry that vLLM's own manager reads.
_ENGINE_TIER_OPTIONS = ("type", "module_path", "backpressure")
_TIERS = "secondary_tiers"
#: The key of kvtier's options in vLLM's configuration. Error messages begin with the key.
EXTRA_CONFIG = Place("kv_connector_extra_config")


class IdentityOptions(StrictModel):
    """Namespace facts that an operator declares.

    Attributes:
        model_revision: a string that distinguishes this model from others of its name.
        kv_release: the release of vLLM with which this engine shares chunks, such as ``"0.32"``;
            ``None`` means the running release.
    """

    model_revision: str | None = None
    kv_release: str | None = None

    @field_validator("kv_release")
    @classmethod
    def _check_release(cls, release: str | None) -> str | None:
        if release is not None and not re.fullmatch(r"[0-9]+\.[0-9]+", release):
            raise ValueError("should be vLLM's major and minor number, for example '0.32'")
        return release


class GuestOptions(EventOptions, IdentityOptions):
    """Options of a kvtier tier under vLLM's manager, in addition to every tier's options.

    Attributes:
        verify: false switches digests off; for measurements and tests only.
        shutdown_timeout_s: time limit for draining the tier, and again for closing the tier.
    """

    verify: Flag = True
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")


@dataclass(frozen=True, slots=True)
class SecondaryTierEntry:
    """One of kvtier's entries in ``secondary_tiers`` under vLLM's own manager."""

    tier: TierSpec
    options: GuestOptions

    @classmethod
    def of_tier(cls, spec: Any, options: Mapping[str, Any]) -> Self:
        """Return kvtier's entry in vLLM's ``spec`` that has these ``options``."""
        # vLLM makes one tier per call, but all entries must be checked together, so read them all.
        entries = spec.extra_config.get(_TIERS, [])
        if not hasattr(spec, "kvtier_entries"):
            spec.kvtier_entries = cls.read_all(entries)
        places = (place for place, own in _ours(entries).items() if own == options)
        entry: Self = spec.kvtier_entries[next(places)]
        return entry

    @classmethod
    def read_all(cls, entries: Sequence[Mapping[str, Any]]) -> dict[Place, Self]:
        """Read kvtier's entries. vLLM checks all other entries."""
        ours = {place: place.table(entry) for place, entry in _ours(entries).items()}
        options = {
            place: validate_options(GuestOptions, GuestOptions.take_from(entry), place)
            for place, entry in ours.items()
        }
        specs = read_tiers({place: {"type": TIER_TYPE, **own} for place, own in ours.items()})
        return {place: cls(spec, options[place]) for place, spec in specs.items()}


def _ours(entries: Sequence[Mapping[str, Any]]) -> dict[Place, dict[str, Any]]:
    """Return kvtier's entries by place, without the options that vLLM itself reads."""
    return {
        EXTRA_CONFIG.at(_TIERS, index): {
            name: value for name, value in entry.items() if name not in _ENGINE_TIER_OPTIONS
        }
        for index, entry in enumerate(entries)
        if entry.get("type") in (TIER_TYPE, CLASS_TYPE)
    }


class EngineOptions(IdentityOptions):
    """Options of kvtier's manager under vLLM, in addition to a :class:`TieringConfig`.

    Attributes:
        copies: the worker that copies between the device and the host pool: ``kvtier``, ``vllm``,
            or ``auto``. On a CPU vLLM has no worker, so ``auto`` means ``kvtier``. On all other
            devices ``auto`` means ``vllm``.
    """

    copies: Literal["auto", "kvtier", "vllm"] = "auto"


class SpecOptions(EngineOptions, TieringConfig):
    """The ``kv_connector_extra_config`` of kvtier's manager. Some options have vLLM's names."""

    # vLLM determines these values, so they are not options here.
    slots: ClassVar[None] = None  # type: ignore[misc]
    chunk_bytes: ClassVar[None] = None  # type: ignore[misc]

    pool_bytes: BytesOrShare | None = Field(None, alias="cpu_bytes_to_use", gt=0)
    policy: str = Field("returns", alias="eviction_policy")
    #: The operator's entries or, after :meth:`from_dict`, the tiers. Workers need no tiers, so they
    #: do not read the entries.
    tiers: Any = Field((), alias="secondary_tiers")

    # vLLM itself reads these options for every spec, so kvtier accepts and ignores them.
    spec_name: Any = None
    spec_module_path: Any = None
    block_size: Any = None
    blocks_per_chunk: Any = None
    offload_prompt_only: Any = None
    self_describing_kv_events: Any = None
    canonical_layout: Any = None
    sync_load_budget_bytes: Any = None

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.pool_bytes is None:
            raise ValueError(
                "option 'cpu_bytes_to_use' is missing; it says how big the host pool is, for "
                "example '4GiB'"
            )
        return self

    @property
    def config(self) -> TieringConfig:
        """The manager's options, under their names in ``TieringConfig``."""
        fields = {name: getattr(self, name) for name in TieringConfig.model_fields}
        return TieringConfig.model_construct(self.model_fields_set & fields.keys(), **fields)

    def read_tiers(self) -> Sequence[TierSpec]:
        """Read the tiers; raise the same errors as :meth:`TieringConfig.from_dict`."""
        return tuple(read_tiers(EXTRA_CONFIG.at(_TIERS).entries(self.tiers)).values())
