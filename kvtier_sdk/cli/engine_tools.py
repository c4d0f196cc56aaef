"""The tools that installed engine packages provide for the commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from kvtier_sdk.engine import EngineTools
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.registry import ENGINES_GROUP, load_all
from kvtier_sdk.types import OffloadKey

#: Top-level options of engines' configurations, and the package of this project that reads each.
_PUBLISHED = {
    "kv_connector": "kvtier-vllm",
    "kv_connector_extra_config": "kvtier-vllm",
}


@cache
def installed_engines() -> Mapping[str, EngineTools]:
    """Return the tools of each engine, by the engine's name."""
    return load_all(ENGINES_GROUP, "engine", EngineTools)  # type: ignore[type-abstract]


def tools_for(options: Mapping[str, Any], *, where: str) -> EngineTools | None:
    """Return the tools that read a configuration; ``None`` if it is kvtier's own."""
    for tools in installed_engines().values():
        if tools.reads(options):
            return tools
    for name in options.keys() & _PUBLISHED.keys():
        package = _PUBLISHED[name]
        raise ConfigError(f"{where}: option {name!r} is an engine's; pip install {package}")
    return None


def prompt_keys(tokens: Sequence[int], facts: Mapping[str, Any]) -> list[list[OffloadKey]]:
    """Compute the keys of a prompt's chunks, as the engine of a namespace does."""
    engine = str(facts.get("engine", "")).partition(" ")[0]
    tools = installed_engines().get(engine)
    if tools is None:
        known = ", ".join(installed_engines()) or "none"
        raise ConfigError(
            f"the namespace's engine is {engine!r}, and no installed package computes its keys; "
            f"installed: {known}"
        )
    return tools.chunk_keys(tokens, facts)
