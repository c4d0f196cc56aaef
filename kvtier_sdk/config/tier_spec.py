"""A tier as it is configured: its backend, its name and its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.options.model import closest, option_path, table_of, validate_options
from kvtier_sdk.options.secrets import hides_more_than_password, masked, url_without_password
from kvtier_sdk.options.tier import RunnerOptions, TierConfig
from kvtier_sdk.options.url import TierURL
from kvtier_sdk.registry import backend_name, load_backend, load_store_policy

#: Options of a tier entry that are neither the backend's nor the runner's.
_ENTRY_OPTIONS = ("type", "backend", "name", "url")


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
            overrides: options that the URL does not give.

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
            entry: the options. ``type`` is the backend's name, or ``"kvtier"`` beside a
                ``backend`` that names it; ``url`` replaces them or adds to them.
            where: the source of the entry; each complaint begins with it.
            path: the entry's place in that source, ``tiers[1]``; empty if it is all of it.

        Returns:
            The validated entry.

        Raises:
            ConfigError: an option is wrong, missing, or given both in the URL and beside it, the
                URL is another backend's, or the store policy cannot be found or loaded.
            BackendError: the backend cannot be found or loaded.
        """
        place = _Place(where, path)
        options = table_of(entry, where=where, path=path)
        for name in _ENTRY_OPTIONS:
            if not isinstance(options.get(name, ""), str):
                raise place.error(name, f"is {masked(name, options[name])!r} but should be text")
        try:
            return cls._read(options, place)
        except ConfigError:
            # A piece of a password that was taken for an option may be what is wrong.
            if hides_more_than_password(options.get("url", "")):
                raise place.error(
                    "url",
                    "cannot be used: it is not clear where its password ends; in names, passwords "
                    "and options write '@' as %40, ':' as %3A, '/' as %2F, '?' as %3F, '#' as %23, "
                    "'%' as %25",
                ) from None
            raise

    @classmethod
    def _read(cls, entry: Mapping[str, Any], place: _Place) -> Self:
        url = _parse_url(entry["url"], place) if "url" in entry else None
        backend = backend_name(_backend_given(entry, url, place))
        tier_class = load_backend(backend)
        own = {key: of for key, of in entry.items() if key not in ("type", "backend", "url")}
        if url is not None:
            if backend_name(url.scheme) != backend:
                raise place.error(
                    "url",
                    f"begins with '{url.scheme}:', which is not the backend {backend!r} that "
                    f"{option_path(place.path, backend_option(entry))!r} names",
                )
            given = _url_options(url, tier_class.config_model, place)
            for key in sorted(given.keys() & own.keys()):
                raise place.error(key, "is given in the URL and beside it")
            own |= given
        name = own.pop("name", backend)
        if not name:
            raise place.error("name", "is empty; leave it out, or give the tier a name")
        common = RunnerOptions.take_from(own)
        known = [*RunnerOptions.option_names(), *_ENTRY_OPTIONS]
        at = {"where": place.where, "path": place.path}
        config = validate_options(tier_class.config_model, own, also_known=known, **at)
        runner = validate_options(RunnerOptions, common, **at)
        try:
            load_store_policy(runner.store_policy)
        except (BackendError, ConfigError) as error:
            option = option_path(place.path, "store_policy")
            raise ConfigError(f"{place.where}: option {option!r}: {error}") from error
        return cls(name, backend, tier_class, config, runner)

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """Write the entry down as plain data that :meth:`from_options` reads.

        Args:
            secrets: write secrets in the clear instead of as ``"***"``.
            defaults: include the options that were not given.

        Returns:
            ``type``, ``name`` and flat options, quantities in bytes and seconds.
        """
        config = self.config.to_dict(secrets=secrets, defaults=defaults)
        runner = self.runner.to_dict(secrets=secrets, defaults=defaults)
        return {"type": self.backend, "name": self.name, **config, **runner}


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of an entry, for complaints about it."""

    where: str
    path: str

    def error(self, option: str, message: str) -> ConfigError:
        """A complaint about one of the entry's options."""
        return ConfigError(f"{self.where}: option {option_path(self.path, option)!r} {message}")


def backend_option(entry: Mapping[str, Any]) -> str:
    """The option of a tier entry that names the backend."""
    if entry.get("type", "kvtier") != "kvtier":
        return "type"
    return next((option for option in ("backend", "url") if option in entry), "type")


def _parse_url(url: str, place: _Place) -> TierURL:
    try:
        return TierURL.parse(url)
    except ConfigError as error:
        raise place.error("url", f"cannot be used: {error}") from None


def _backend_given(entry: Mapping[str, Any], url: TierURL | None, place: _Place) -> str:
    """A backend's name, or a scheme that stands for it."""
    option = backend_option(entry)
    if option == "url" and url is not None:
        return url.scheme
    name = str(entry.get(option, "kvtier"))
    if name == "kvtier":
        # A misspelt 'type' is an unknown option, not a missing one.
        known = [*_ENTRY_OPTIONS, *RunnerOptions.option_names()]
        misspelt = {
            key: None for key in entry.keys() - set(known) if closest(key, known) in _ENTRY_OPTIONS
        }
        validate_options(
            RunnerOptions, misspelt, where=place.where, path=place.path, also_known=_ENTRY_OPTIONS
        )
        missing = "backend" if "type" in entry or "backend" in entry else "type"
        raise place.error(missing, "is missing; it names the backend")
    if entry.get("backend", name) != name:
        raise place.error("backend", f"is {entry['backend']!r}, but 'type' is {name!r}")
    return name


def _url_options(url: TierURL, model: type[TierConfig], place: _Place) -> dict[str, Any]:
    """All options of a URL: the backend's, the runner's, and ``name``."""
    own = dict(url.options)
    common = RunnerOptions.take_from(own)
    if "name" in own:
        common["name"] = own.pop("name")
    try:
        return model.options_from_url(replace(url, options=own)) | common
    except ConfigError as error:
        raise place.error("url", f"cannot be used: {error}") from None
