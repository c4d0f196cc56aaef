"""The argument with a command's tiers: a URL, a configuration, or vLLM's JSON."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.engine import EngineTools
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.place import nearest
from kvtier_sdk.options.secrets import url_without_password
from kvtier_sdk.registry import load_all
from kvtier_sdk.types import OffloadKey

TARGET = "TIERS"
TARGET_HELP = (
    "A tier's URL ('file:///data/kv', 'redis://cache:6379/0'); a configuration in TOML, JSON or "
    "YAML; or a JSON file with the value of vLLM's --kv-transfer-config. 'kv.toml#NAME' is one "
    "tier of it."
)

#: Top-level options of vLLM, whose configuration kvtier-vllm reads.
_VLLM = {"kv_connector", "kv_connector_extra_config"}

_URL = re.compile(r"[A-Za-z][\w+.-]*:")


@dataclass(frozen=True, slots=True)
class Target:
    """The tiers that an argument names. A URL names one tier, and configures no host pool."""

    name: str
    config: TieringConfig
    is_url: bool = False
    engine: EngineTools | None = None

    @property
    def only_tier(self) -> TierSpec:
        """The target's only tier; raises :class:`ConfigError` unless there is exactly one."""
        tiers = self.config.tiers
        if len(tiers) == 1:
            return tiers[0]
        if not tiers:
            raise ConfigError(f"{self.name}: it has no tier")
        names = ", ".join(repr(spec.name) for spec in tiers)
        raise ConfigError(
            f"{self.name}: it has {len(tiers)} tiers, {names}; name one, as in "
            f"'{self.name}#{tiers[0].name}'"
        )


def read_target(text: str) -> Target:
    if is_url(text):
        spec = TierSpec.from_url(text)
        config = TieringConfig.model_construct(tiers=(spec,))
        return Target(url_without_password(text), config, is_url=True)
    path, tier = text, ""
    if "#" in text and not os.path.exists(text):
        path, _, tier = text.rpartition("#")
    options = read_options(Path(path))
    engine = tools_for(options, where=path)
    read = TieringConfig.from_dict if engine is None else engine.read
    config = read(options, where=path)
    if tier:
        named = {spec.name: spec for spec in config.tiers}
        if tier not in named:
            known = nearest(tier, named, "its tiers")
            raise ConfigError(f"{path}: no tier is named {tier!r}; {known}")
        config = config.model_copy(update={"tiers": (named[tier],)})
    return Target(text, config, engine=engine)


def is_url(text: str) -> bool:
    """Return true for a tier's URL, and false for the path of a file."""
    # Do not use Path.exists, because it raises an error for a long URL.
    return _URL.match(text) is not None and not os.path.exists(text)


@cache
def installed_engines() -> Mapping[str, EngineTools]:
    return load_all("kvtier.engines", "engine", EngineTools)  # type: ignore[type-abstract]


def tools_for(options: Mapping[str, Any], *, where: str) -> EngineTools | None:
    """Return the tools of the engine that reads ``options``, or ``None`` if kvtier reads them."""
    for tools in installed_engines().values():
        if tools.reads(options):
            return tools
    for name in options.keys() & _VLLM:
        raise ConfigError(f"{where}: option {name!r} is an engine's; pip install kvtier-vllm")
    return None


def prompt_keys(
    tokens: Sequence[int], facts: Mapping[str, Any], salt: str | None = None
) -> list[list[OffloadKey]]:
    engine = str(facts.get("engine", "")).partition(" ")[0]
    tools = installed_engines().get(engine)
    if tools is None:
        known = ", ".join(installed_engines()) or "none"
        raise ConfigError(
            f"the namespace's engine is {engine!r}, and no installed package computes its keys; "
            f"installed: {known}"
        )
    return tools.chunk_keys(tokens, facts, salt)
