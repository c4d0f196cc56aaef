"""A tier as it is configured: which backend, under which name, with which options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.model import (
    closest,
    nearest,
    option_path,
    validate_options,
)
from kvtier_sdk.options.secrets import hides_more_than_password, masked, url_without_password
from kvtier_sdk.options.tier import (
    RunnerOptions,
    TierConfig,
)
from kvtier_sdk.options.url import TierURL
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
        return cls.from_options(
            {"url": url, **overrides}, where=f"tier {url_without_password(url)!r}"
        )

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
        place = _Place(where, path)
        _check_text(entry, place)
        try:
            return cls._read(entry, place)
        except ConfigError:
            # What is wrong may well be a piece of a password that was taken for an option.
            if hides_more_than_password(entry.get("url", "")):
                raise place.error(
                    "url",
                    "cannot be used: it is not clear where its password ends; in names, passwords "
                    "and options write '@' as %40, ':' as %3A, '/' as %2F, '?' as %3F, '#' as %23, "
                    "'%' as %25",
                ) from None
            raise

    @classmethod
    def _read(cls, entry: Mapping[str, Any], place: _Place) -> Self:
        url = _parse_url(entry, place)
        backend = backend_name(_backend_given(entry, url, place))
        tier_class = load_backend(backend)
        options: dict[str, Any] = {
            key: value for key, value in entry.items() if key not in ("type", "backend", "url")
        }
        if url is not None:
            if backend_name(url.scheme) != backend:
                raise place.error(
                    "url",
                    f"begins with '{url.scheme}:', which is not the backend {backend!r} that "
                    f"{option_path(place.path, backend_option(entry))!r} names",
                )
            given = _url_options(url, tier_class, place)
            for key in sorted(given.keys() & options.keys()):
                raise place.error(key, "is given in the URL and beside it")
            options |= given
        name = options.pop("name", backend)
        if not name:
            raise place.error("name", "is empty; leave it out, or give the tier a name")
        own, common = _split_options(options)
        return cls(
            name=name,
            backend=backend,
            tier_class=tier_class,
            config=validate_options(
                tier_class.config_model,
                own,
                where=place.where,
                path=place.path,
                also_known=[*RunnerOptions.option_names(), *_ENTRY_KEYS],
            ),
            runner=validate_options(RunnerOptions, common, where=place.where, path=place.path),
        )

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """The entry as plain data that :meth:`from_options` reads.

        Args:
            secrets: whether to give them away; else they are ``"***"``.
            defaults: whether to name those too that were not given.

        Returns:
            ``type``, ``name`` and flat options, quantities in bytes and seconds.
        """
        config = self.config.to_dict(secrets=secrets, defaults=defaults)
        runner = self.runner.to_dict(secrets=secrets, defaults=defaults)
        return {"type": self.backend, "name": self.name, **config, **runner}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an entry stands, for complaints about it."""

    where: str
    path: str

    def error(self, option: str, message: str) -> ConfigError:
        """A complaint about one of the entry's options."""
        return ConfigError(f"{self.where}: option {option_path(self.path, option)!r} {message}")


def backend_option(entry: Mapping[str, Any]) -> str:
    """Which of a tier entry's options names the backend."""
    if entry.get("type", "kvtier") != "kvtier":
        return "type"
    return next((option for option in ("backend", "url") if option in entry), "type")


def _check_text(entry: Mapping[str, Any], place: _Place) -> None:
    for key in _ENTRY_KEYS:
        if key in entry and not isinstance(entry[key], str):
            raise place.error(key, f"is {masked(key, entry[key])!r} but should be text")


def _parse_url(entry: Mapping[str, Any], place: _Place) -> TierURL | None:
    if "url" not in entry:
        return None
    try:
        return TierURL.parse(entry["url"])
    except ConfigError as error:
        raise place.error("url", f"cannot be used: {error}") from None


def _backend_given(entry: Mapping[str, Any], url: TierURL | None, place: _Place) -> str:
    """What names the backend: its name, or a URL's scheme."""
    option = backend_option(entry)
    if option == "url" and url is not None:
        return url.scheme
    name = entry.get(option, "kvtier")
    if name == "kvtier":
        raise _missing_backend(entry, place)
    if entry.get("backend", name) != name:
        raise place.error("backend", f"is {entry['backend']!r}, but 'type' is {name!r}")
    return str(name)


def _missing_backend(entry: Mapping[str, Any], place: _Place) -> ConfigError:
    # A misspelt 'type' is an unknown option, not a missing one.
    known = [*_ENTRY_KEYS, *RunnerOptions.option_names()]
    for key in sorted(entry.keys() - set(known)):
        if closest(key, known) in _ENTRY_KEYS:
            return ConfigError(
                f"{place.where}: unknown option {option_path(place.path, key)!r}; "
                f"{nearest(key, known, 'allowed')}"
            )
    missing = "backend" if "type" in entry or "backend" in entry else "type"
    return place.error(missing, "is missing; it names the backend")


def _url_options(
    url: TierURL, tier_class: type[SecondaryTierManager], place: _Place
) -> dict[str, Any]:
    """All options that a URL gives: the backend's, the runner's, and ``name``."""
    own, common = _split_options(url.options)
    name = {"name": own.pop("name")} if "name" in own else {}
    try:
        own = tier_class.config_model.options_from_url(replace(url, options=own))
    except ConfigError as error:
        raise place.error("url", f"cannot be used: {error}") from None
    return own | common | name


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The backend's options and the runner's."""
    common = set(RunnerOptions.option_names())
    return (
        {key: value for key, value in options.items() if key not in common},
        {key: value for key, value in options.items() if key in common},
    )
