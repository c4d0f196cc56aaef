"""A tier's configuration: backend, name and options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from kvtier_sdk.chunk_header import header_bytes, round_up
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place, closest
from kvtier_sdk.options.secrets import masked, url_without_password
from kvtier_sdk.options.tier import RunnerOptions, TierConfig
from kvtier_sdk.options.url import TierURL
from kvtier_sdk.registry import backend_name, load_backend, load_codec, load_store_policy

#: Options of a tier that are neither the backend's nor the runner's.
_ENTRY_OPTIONS = ("type", "backend", "name", "url")
#: Options that a tier of any backend can have.
_COMMON = (*_ENTRY_OPTIONS, *RunnerOptions.option_names())


@dataclass(frozen=True, slots=True)
class TierSpec:
    """The validated configuration of a tier.

    Attributes:
        name: the tier's name, unique in its manager.
        backend: the backend's name.
        tier_class: the backend's class.
        config: the backend's options.
        runner: the options that every tier has.
        engine_waits: false if the engine is already serving. The tier is then opened in the
            background, and opening is retried after any error.
        verify: false turns digests off; for measurements and tests only.
        is_rounded: true if this or another tier of the engine may round the tier's chunks.
        inventory: the announcements to routers: ``"off"``, ``"hashes"``, or ``"tokens"`` for both
            hashes and tokens. The tier stores the announced tokens.
    """

    name: str
    backend: str
    tier_class: type[SecondaryTierManager]
    config: TierConfig
    runner: RunnerOptions
    engine_waits: bool = True
    verify: bool = True
    is_rounded: bool = False
    inventory: Literal["off", "hashes", "tokens"] = "off"

    @classmethod
    def from_url(cls, url: str, **overrides: Any) -> Self:
        """Read a ``url`` such as ``file:///data/kv?capacity=1GiB&load_deadline=2s&name=cold``.

        The scheme names the backend. The query contains the backend's options, the options that
        every tier has, and the tier's name. The URL must not contain any of the ``overrides``.

        Raises:
            ConfigError: the URL or an option is wrong.
            BackendError: the backend cannot be found or loaded.
        """
        return cls.from_options(
            {"url": url, **overrides}, where=f"tier {url_without_password(url)!r}"
        )

    @classmethod
    def from_options(cls, entry: Mapping[str, Any], *, where: str = "tier", path: str = "") -> Self:
        """Read the configuration of a tier: options, a ``url`` or both, with an optional ``name``.

        Args:
            entry: the options. ``type`` is the backend's name, or ``"kvtier"`` if
                ``backend`` gives the name. A ``url`` replaces or completes these options.
            where: the source of the entry; each error message begins with this text.
            path: the entry's place in the source, such as ``tiers[1]``.

        Raises:
            ConfigError: an option is wrong, missing or given twice, or the store policy or the
                codec cannot be found or used.
            BackendError: the backend cannot be found or loaded.
        """
        place = Place(where, path)
        options = place.table(entry)
        for name in _ENTRY_OPTIONS:
            if not isinstance(options.get(name, ""), str):
                given = masked(name, options[name])
                raise ConfigError(f"{place.at(name)} is {given!r} but should be text")
            if name != "url" and "//" in options.get(name, ""):
                meant = place.at("url").path
                raise ConfigError(f"{place.at(name)} is a URL; write it as option {meant!r}")
        url = None
        if "url" in options:
            with _faults_of_url(place):
                url = TierURL.parse(options["url"])
        named_by, name_given = _backend_given(options, url, place)
        try:
            backend = backend_name(name_given)
            tier_class = load_backend(backend)
        except BackendError as error:
            raise type(error)(f"{place.at(named_by)}: {error}") from error.__cause__
        own = {key: of for key, of in options.items() if key not in ("type", "backend", "url")}
        if url is not None:
            if backend_name(url.scheme) != backend:
                raise ConfigError(
                    f"{place.at('url')} begins with '{url.scheme}:', which is not the backend "
                    f"{backend!r} that {place.at(named_by).path!r} names"
                )
            given = _url_options(url, tier_class.config_model, place)
            for key in sorted(given.keys() & own.keys()):
                raise ConfigError(f"{place.at(key)} is given in the URL and beside it")
            own |= given
        name = own.pop("name", backend)
        if not name:
            raise ConfigError(f"{place.at('name')} is empty; leave it out, or give the tier a name")
        common = RunnerOptions.take_from(own)
        config = validate_options(tier_class.config_model, own, place, _COMMON)
        runner = validate_options(RunnerOptions, {**tier_class.runner_defaults, **common}, place)
        if tier_class.needs_process and runner.runner == "thread":
            raise ConfigError(
                f"{place.at('runner')} is 'thread', but backend {backend!r} has to run in a "
                "process of its own; leave the option out"
            )
        for option, load in (("store_policy", load_store_policy), ("codec", load_codec)):
            if (given := getattr(runner, option)) is not None:
                try:
                    load(given)
                except (BackendError, ConfigError) as error:
                    raise ConfigError(f"{place.at(option)}: {error}") from error.__cause__
        is_rounded = runner.compress == "fp8" and not tier_class.fixed_length
        return cls(name, backend, tier_class, config, runner, is_rounded=is_rounded)

    def namespace_of(self, namespace: Namespace, chunk_bytes: int) -> Namespace:
        """Add the fact ``chunk_bytes`` and the facts of :meth:`in_tier` to a ``namespace``."""
        return self.in_tier(namespace.for_chunks(chunk_bytes))

    def in_tier(self, namespace: Namespace) -> Namespace:
        """Add the facts ``codec`` and ``compress`` to a ``namespace`` if they apply to the tier."""
        codec = self.runner.codec_name
        facts = {} if codec is None else {"codec": codec}
        return namespace.adding(**facts, **({"compress": "fp8"} if self.is_rounded else {}))

    def object_lengths(self, chunk_bytes: int) -> tuple[int, int]:
        """Return the lengths of the header and of the payload for a chunk of ``chunk_bytes``."""
        codec, alignment = self.runner.codec, self.tier_class.alignment
        envelope_bytes = 0 if codec is None else load_codec(codec).envelope_bytes
        return header_bytes(alignment, envelope_bytes), round_up(chunk_bytes, alignment)

    def changed(self, options: Mapping[str, Any], place: Place) -> Self:
        """Return a copy with other live ``options``; raise a :class:`ConfigError` at ``place``."""
        own = dict(options)
        runner = self.runner.changed(RunnerOptions.take_from(own), place)
        config = self.config.changed(own, place, _COMMON)
        if (runner.compress == "fp8") != (self.runner.compress == "fp8"):
            raise ConfigError(f"{place} a restart of the engine is needed to change 'fp8'")
        return replace(self, config=config, runner=runner)

    def set_live(self, changed: Self) -> dict[str, tuple[Any, Any]]:
        """Copy the live options from ``changed``; return the old and new value of each change."""
        return self.config.set_live(changed.config) | self.runner.set_live(changed.runner)

    def live_values(self) -> dict[str, tuple[Any, Any]]:
        """Return the configured and the current value of each live option, as plain data."""
        return self.config.live_values() | self.runner.live_values()

    def needed(self, required: bool = True) -> Self:
        """Return a copy with the option ``required`` set to the argument."""
        return replace(self, runner=self.runner.model_copy(update={"required": required}))

    def in_background(self) -> Self:
        """Return a copy for an engine that is already serving and does not wait for tiers."""
        return replace(self.needed(False), engine_waits=False)

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """Return the configuration as plain data that :meth:`from_options` reads.

        Set ``secrets`` to show secrets in the clear, and ``defaults`` to add the unset options.
        """
        config = self.config.to_dict(secrets=secrets, defaults=defaults)
        runner = self.runner.to_dict(secrets=secrets, defaults=defaults)
        return {"type": self.backend, "name": self.name, **config, **runner}


@contextmanager
def _faults_of_url(place: Place) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place.at('url')} cannot be used: {error}") from None


def _backend_given(entry: Mapping[str, Any], url: TierURL | None, place: Place) -> tuple[str, str]:
    """Return the option that names the backend, and the backend's name (for a URL, the scheme)."""
    if entry.get("type", "kvtier") != "kvtier":
        option, name = "type", entry["type"]
    elif entry.get("backend", "kvtier") != "kvtier":
        option, name = "backend", entry["backend"]
    elif url is not None:
        option, name = "url", url.scheme
    else:
        # Report a misspelt 'type' as unknown, because "'type' is missing" would hide the mistake.
        unknown = entry.keys() - set(_COMMON)
        misspelt = {key: None for key in unknown if closest(key, _COMMON) in _ENTRY_OPTIONS}
        validate_options(RunnerOptions, misspelt, place, _ENTRY_OPTIONS)
        missing = "backend" if "type" in entry or "backend" in entry else "type"
        raise ConfigError(f"{place.at(missing)} is missing; it names the backend")
    if entry.get("backend", name) != name:
        raise ConfigError(
            f"{place.at('backend')} is {entry['backend']!r}, but {option!r} is {name!r}"
        )
    return option, name


def _url_options(url: TierURL, model: type[TierConfig], place: Place) -> dict[str, Any]:
    own = dict(url.options)
    common = {key: own.pop(key) for key in ("name", *RunnerOptions.option_names()) if key in own}
    with _faults_of_url(place):
        own = model.options_from_url(replace(url, options=own))
    return own | common
