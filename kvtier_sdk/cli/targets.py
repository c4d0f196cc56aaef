"""The tiers that a command works on: a URL, a configuration, or vLLM's JSON."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from kvtier_sdk.cli.engine_tools import tools_for
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.engine import EngineTools
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.place import nearest
from kvtier_sdk.options.secrets import url_without_password

#: Metavar and help of an argument that names tiers.
TARGET = "TIERS"
TARGET_HELP = (
    "A tier's URL ('file:///data/kv', 'redis://cache:6379/0'); a configuration in TOML, JSON or "
    "YAML; or a JSON file with the value of vLLM's --kv-transfer-config. 'kv.toml#NAME' is one "
    "tier of it."
)

_URL = re.compile(r"[A-Za-z][\w+.-]*:")


@dataclass(frozen=True, slots=True)
class Target:
    """The tiers named by an argument.

    Attributes:
        name: the argument, without passwords.
        is_url: true for a URL, which describes no host pool.
        engine: the tools of the configuration's engine; ``None`` for kvtier's own configuration.
    """

    name: str
    config: TieringConfig
    is_url: bool = False
    engine: EngineTools | None = None

    @property
    def tiers(self) -> tuple[TierSpec, ...]:
        return self.config.tiers

    @property
    def only_tier(self) -> TierSpec:
        """The tier, for a command that works on one; with several, or none, an error."""
        if len(self.tiers) == 1:
            return self.tiers[0]
        if not self.tiers:
            raise ConfigError(f"{self.name}: it has no tier")
        names = ", ".join(repr(spec.name) for spec in self.tiers)
        raise ConfigError(
            f"{self.name}: it has {len(self.tiers)} tiers, {names}; name one, as in "
            f"'{self.name}#{self.tiers[0].name}'"
        )


def read_target(text: str) -> Target:
    """Read an argument that names tiers."""
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
        config = config.model_copy(update={"tiers": (_named(config, tier, path),)})
    return Target(text, config, engine=engine)


def is_url(text: str) -> bool:
    """Return true for a tier's URL, and false for the path of a file."""
    # Not Path.exists, which raises for a long URL.
    return _URL.match(text) is not None and not os.path.exists(text)


def _named(config: TieringConfig, name: str, path: str) -> TierSpec:
    for spec in config.tiers:
        if spec.name == name:
            return spec
    known = nearest(name, (spec.name for spec in config.tiers), "its tiers")
    raise ConfigError(f"{path}: no tier is named {name!r}; {known}")
