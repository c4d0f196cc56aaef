"""A tier as it is configured: which backend, under which name, with which options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvtier_sdk.config import RunnerOptions, TierConfig, TierURL, validate_options, without_password
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.registry import load_backend

# Keys of a tier entry that are neither the backend's nor the runner's.
_ENTRY_KEYS = ("type", "backend", "name", "url")


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A validated tier entry.

    Attributes:
        name: unique in its manager.
        backend: the backend's name.
        tier_class: the backend.
        config: its options.
        runner: the options that every tier has.
    """

    name: str
    backend: str
    tier_class: type[SecondaryTierManager]
    config: TierConfig
    runner: RunnerOptions

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """Read a tier URL such as ``file:///data/kv?capacity=1GiB&load_deadline=2s``.

        Args:
            url: the scheme names the backend, the query its options and the runner's; ``name``
                in the query names the tier.
            overrides: options on top of the URL's.

        Returns:
            The validated entry.

        Raises:
            ConfigError: the URL or an option is wrong.
            BackendError: the backend cannot be found or loaded.
        """
        return cls.from_options({"url": url, **overrides}, where=f"tier {without_password(url)!r}")

    @classmethod
    def from_options(cls, entry: Mapping[str, Any], *, where: str = "tier") -> Self:
        """Read a tier entry: ``type``, optional ``name``, ``url`` or flat options.

        Args:
            entry: the options. ``type`` is the backend's name, or ``"kvtier"`` with ``backend``
                naming it; ``url`` takes their place or completes them.
            where: the entry's path, with which each complaint begins.

        Returns:
            The validated entry.

        Raises:
            ConfigError: an option is wrong, missing, or given both in the URL and beside it.
            BackendError: the backend cannot be found or loaded.
        """
        options = {key: value for key, value in entry.items() if key not in _ENTRY_KEYS}
        backend = entry.get("type")
        if backend == "kvtier" or backend is None:
            backend = entry.get("backend", backend)
        text = entry.get("url", "")
        if not isinstance(text, str):
            raise ConfigError(f"{where}: option 'url' is {text!r} but should be text")
        url = TierURL.parse(text) if "url" in entry else None
        if backend in (None, "kvtier"):
            backend = url.scheme if url else None
        if not isinstance(backend, str):
            raise ConfigError(f"{where}: option 'type' is missing; it names the backend")
        tier_class = load_backend(backend)
        name = entry.get("name")
        if url is not None:
            own, common = _split_options(url.options)
            if "name" in own and name is not None:
                raise ConfigError(f"{where}: option 'name' is given in the URL and beside it")
            name = own.pop("name", name)
            parts = tier_class.config_model.options_from_url(replace(url, options=own))
            for key in (parts | common).keys() & options.keys():
                raise ConfigError(f"{where}: option {key!r} is given in the URL and beside it")
            options |= parts | common
        own, common = _split_options(options)
        return cls(
            name=str(name) if name is not None else backend,
            backend=backend,
            tier_class=tier_class,
            config=validate_options(
                tier_class.config_model,
                own,
                where=where,
                also_known=[*RunnerOptions.option_names(), *_ENTRY_KEYS],
            ),
            runner=validate_options(RunnerOptions, common, where=where),
        )


def with_unique_names(specs: Iterable[TierSpec]) -> list[TierSpec]:
    """Check that no two tiers have one name.

    Args:
        specs: tiers, in the order in which they are asked.

    Returns:
        The same, as a list.

    Raises:
        ConfigError: two have one name; the message says how to name them.
    """
    checked: dict[str, TierSpec] = {}
    for spec in specs:
        if spec.name in checked:
            raise ConfigError(
                f"two tiers are named {spec.name!r}; give one of them another name, for example "
                f"'name={spec.name}-2' in its URL"
            )
        checked[spec.name] = spec
    return list(checked.values())


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's options and the runner's."""
    common = set(RunnerOptions.option_names())
    return (
        {key: value for key, value in options.items() if key not in common},
        {key: value for key, value in options.items() if key in common},
    )
