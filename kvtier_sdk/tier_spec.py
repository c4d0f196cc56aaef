"""A tier as it is configured: which backend, under which name, with which options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvtier_sdk.config import (
    RunnerOptions,
    TierConfig,
    TierURL,
    closest,
    nearest,
    option_path,
    validate_options,
)
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.masking import without_password
from kvtier_sdk.registry import backend_name, load_backend

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
    def from_options(cls, entry: Mapping[str, Any], *, where: str = "tier", path: str = "") -> Self:
        """Read a tier entry: ``type``, optional ``name``, ``url`` or flat options.

        Args:
            entry: the options. ``type`` is the backend's name, or ``"kvtier"`` with ``backend``
                naming it; ``url`` takes their place or completes them.
            where: what the entry belongs to, with which each complaint begins.
            path: of the entry inside of that, ``tiers[1]``; empty where it is all.

        Returns:
            The validated entry.

        Raises:
            ConfigError: an option is wrong, missing, or given both in the URL and beside it, or
                the URL is another backend's.
            BackendError: the backend cannot be found or loaded.
        """
        for key in _ENTRY_KEYS:
            if key in entry and not isinstance(entry[key], str):
                raise ConfigError(
                    f"{where}: option {option_path(path, key)!r} is {entry[key]!r} "
                    "but should be text"
                )
        url = _parse_url(entry, where, path)
        backend = backend_name(_backend_given(entry, url, where, path))
        tier_class = load_backend(backend)
        if url is not None and backend_name(url.scheme) != backend:
            raise ConfigError(
                f"{where}: option {option_path(path, 'url')!r} begins with '{url.scheme}:', which "
                f"is not the backend {backend!r} that "
                f"{option_path(path, backend_option(entry))!r} names"
            )
        options = {key: value for key, value in entry.items() if key not in _ENTRY_KEYS}
        name = entry.get("name")
        if url is not None:
            given = _url_options(url, tier_class, where)
            for key in given.keys() & (options | {"name": name} if name else options).keys():
                raise ConfigError(
                    f"{where}: option {option_path(path, key)!r} is given in the URL and beside it"
                )
            name = given.pop("name", name)
            options |= given
        own, common = _split_options(options)
        return cls(
            name=name or backend,
            backend=backend,
            tier_class=tier_class,
            config=validate_options(
                tier_class.config_model,
                own,
                where=where,
                path=path,
                also_known=[*RunnerOptions.option_names(), *_ENTRY_KEYS],
            ),
            runner=validate_options(RunnerOptions, common, where=where, path=path),
        )

    def to_dict(self, *, secrets: bool = False) -> dict[str, Any]:
        """The entry as plain data that :meth:`from_options` reads; defaults are left out.

        Args:
            secrets: whether to give them away; else they are ``"***"``.

        Returns:
            ``type``, ``name`` and flat options, quantities in bytes and seconds.
        """
        config = self.config.to_dict(secrets=secrets)
        runner = self.runner.to_dict(secrets=secrets)
        return {"type": self.backend, "name": self.name, **config, **runner}


def backend_option(entry: Mapping[str, Any]) -> str:
    """Which of a tier entry's options names the backend."""
    if "backend" in entry and entry.get("type", "kvtier") == "kvtier":
        return "backend"
    return "url" if "url" in entry and entry.get("type", "kvtier") == "kvtier" else "type"


def _parse_url(entry: Mapping[str, Any], where: str, path: str) -> TierURL | None:
    if "url" not in entry:
        return None
    try:
        return TierURL.parse(entry["url"])
    except ConfigError as error:
        at = f" option {option_path(path, 'url')!r}:" if path else ""
        raise ConfigError(f"{where}:{at} {error}") from None


def _backend_given(entry: Mapping[str, Any], url: TierURL | None, where: str, path: str) -> str:
    option = backend_option(entry)
    if option == "url" and url is not None:
        return url.scheme
    name = entry.get(option)
    if isinstance(name, str) and name != "kvtier":
        return name
    # A misspelt 'type' is an unknown option, not a missing one.
    known = [*_ENTRY_KEYS, *RunnerOptions.option_names()]
    for key in entry.keys() - set(known):
        if closest(key, known) in _ENTRY_KEYS:
            text = f"unknown option {option_path(path, key)!r}; {nearest(key, known, 'allowed')}"
            raise ConfigError(f"{where}: {text}")
    missing = "backend" if name == "kvtier" else "type"
    raise ConfigError(
        f"{where}: option {option_path(path, missing)!r} is missing; it names the backend"
    )


def _url_options(
    url: TierURL, tier_class: type[SecondaryTierManager], where: str
) -> dict[str, Any]:
    """All options that a URL gives: the backend's, the runner's, and ``name``."""
    own, common = _split_options(url.options)
    name = {"name": own.pop("name")} if "name" in own else {}
    return tier_class.config_model.options_from_url(replace(url, options=own)) | common | name


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's options and the runner's."""
    common = set(RunnerOptions.option_names())
    return (
        {key: value for key, value in options.items() if key not in common},
        {key: value for key, value in options.items() if key in common},
    )
