"""The whole configuration: host pool, policies and tiers, for code, command line and engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import Field, InstanceOf, field_validator, model_validator

from kvtier_sdk.config.location_conflicts import location_conflicts
from kvtier_sdk.config.tier_spec import TierSpec, backend_option
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.model import (
    StrictModel,
    kind_of,
    option_path,
    validate_options,
)
from kvtier_sdk.options.secrets import masked
from kvtier_sdk.options.units import Bytes, BytesOrShare, Count, Flag, Seconds, Share
from kvtier_sdk.registry import load_policy, load_store_policy

T = TypeVar("T")


class TieringConfig(StrictModel):
    """What a manager is made from: the host pool, how it is used, and the tiers behind it.

    Build one with :meth:`from_dict` or :meth:`from_file`; either ``slots`` or ``pool_bytes`` is
    needed.

    Attributes:
        slots: how many chunks the host pool holds.
        pool_bytes: instead of ``slots``: the host pool's size in bytes, or its share of the
            machine's memory: ``64GiB``, ``25%``.
        chunk_bytes: payload of a chunk; an engine that knows it needs no such option.
        policy: name of the host pool's eviction policy: ``lru``, ``arc``, ``fifo``, or one that
            another package brings.
        store_reserve: share of the slots that promotions leave to stores; the same share is kept
            free where a tier is given what is evicted.
        recompute_s: how long the engine takes to recompute a chunk: what a tier brings more
            slowly than that is a miss; loads are not judged where absent.
        verify: whether digests are checked; off for measurements and tests only.
        shutdown_timeout_s: how long each tier may take to drain, and then to close.
        namespace: further facts that must match for stored bytes to be reusable, name to plain
            value: ``{"model": "my-model", "revision": "v2"}``; an engine adds its own.
        tiers: the secondary tiers, in the order in which they are asked: a URL each, or a table
            with ``type``, optional ``name``, and ``url`` or flat options.
    """

    slots: Count | None = Field(None, ge=1)
    pool_bytes: BytesOrShare | None = Field(None, gt=0)
    chunk_bytes: Bytes | None = Field(None, gt=0)
    policy: str = "lru"
    store_reserve: Share = Field(0.1, lt=1)
    recompute_s: Seconds | None = Field(None, alias="recompute", gt=0)
    verify: Flag = True
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")
    namespace: Mapping[str, Any] = Field(default_factory=dict)
    tiers: tuple[InstanceOf[TierSpec], ...] = ()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], *, where: str = "configuration") -> Self:
        """Read options, as they are written in a file.

        Args:
            options: option name to value; ``tiers`` is a list of URLs, tables and specs.
            where: what the options belong to, with which each complaint begins.

        Returns:
            The validated configuration. Every backend and policy in it has been imported.

        Raises:
            ConfigError: one line a mistake, with the path of its option: an unknown name, a
                missing option, a wrong value, two tiers of one name, a backend or a policy that
                is not installed or cannot be imported.
        """
        _check_table(options, where, "")
        mistakes = _Mistakes()
        own = {name: value for name, value in options.items() if name != "tiers"}
        config = mistakes.caught(lambda: validate_options(cls, own, where=where))
        specs = _read_tiers(options.get("tiers", []), where, mistakes)
        if config is not None:
            mistakes.caught(lambda: load_policy(config.policy), f"{where}: option 'policy': ")
        mistakes.tell()
        assert config is not None, "else there was a mistake to tell"
        return config.model_copy(update={"tiers": tuple(specs)})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a file.

        Args:
            path: a file in TOML (``.toml``), JSON (``.json``), or YAML (``.yaml``, ``.yml``; with
                the extra ``yaml``).

        Returns:
            The validated configuration.

        Raises:
            ConfigError: the file cannot be read or parsed, or as for :meth:`from_dict`; each
                line begins with the path of the file.
        """
        return cls.from_dict(read_options(Path(path)), where=str(path))

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """The options that were given, as plain data that :meth:`from_dict` reads.

        Args:
            secrets: whether to give them away; else they are ``"***"``.
            defaults: whether to name those too that were not given.

        Returns:
            Option name to value, quantities in bytes and seconds.
        """
        plain = self.model_copy(update={"tiers": ()})
        given = super(TieringConfig, plain).to_dict(secrets=secrets, defaults=defaults)
        if self.tiers:
            given["tiers"] = [
                spec.to_dict(secrets=secrets, defaults=defaults) for spec in self.tiers
            ]
        return given

    def bind(self, namespace: Namespace) -> Namespace:
        """Add the configured facts to those that an engine knows.

        Args:
            namespace: the engine's.

        Returns:
            The facts of both.

        Raises:
            ConfigError: they contradict each other.
        """
        for name in sorted(self.namespace.keys() & namespace.facts.keys()):
            ours, theirs = self.namespace[name], namespace.facts[name]
            if ours != theirs:
                raise ConfigError(
                    f"option {option_path('namespace', name)!r} is {masked(name, ours)!r}, but "
                    f"the engine says {masked(name, theirs)!r}; leave it out"
                )
        return Namespace({**namespace.facts, **self.namespace})

    @field_validator("namespace")
    @classmethod
    def _check_facts(cls, facts: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            json.dumps(facts, allow_nan=False)
        except (TypeError, ValueError):
            raise ValueError(
                "should hold text, numbers, true or false, and lists and tables of them"
            ) from None
        return facts

    @model_validator(mode="after")
    def _check_pool(self) -> Self:
        if self.slots is None and self.pool_bytes is None:
            raise ValueError(
                "option 'slots' or 'pool_bytes' is missing; it says how big the host pool is, for "
                "example pool_bytes '4GiB' or '5%'"
            )
        if self.slots is not None and self.pool_bytes is not None:
            raise ValueError("options 'slots' and 'pool_bytes' are both given; leave one out")
        return self


class _Mistakes:
    """Collects complaints, so that all are told at once."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, line: str) -> None:
        self._lines.append(line)

    def caught(self, call: Callable[[], T], prefix: str = "") -> T | None:
        """What the call returns; where it raises a complaint, ``None``.

        Args:
            call: may raise a :class:`ConfigError` or a :class:`BackendError`.
            prefix: what the complaint begins with.
        """
        try:
            return call()
        except (ConfigError, BackendError) as error:
            self.add(f"{prefix}{error}")
        return None

    def tell(self) -> None:
        """Raise what was collected, if anything was."""
        if self._lines:
            raise ConfigError("\n".join(self._lines))


def _check_table(options: object, where: str, path: str) -> None:
    at = f"option {path!r} " if path else ""
    if not isinstance(options, Mapping):
        raise ConfigError(f"{where}: {at}should be a table of options, not {kind_of(options)}")
    for name in options:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: option {option_path(path, str(name))!r} is no text name")


def _read_tiers(entries: object, where: str, mistakes: _Mistakes) -> list[TierSpec]:
    if not isinstance(entries, list | tuple):
        mistakes.add(f"{where}: option 'tiers' should be a list, not {kind_of(entries)}")
        return []
    owners = {PRIMARY: "the host pool"}
    specs: dict[str, TierSpec] = {}
    for index, entry in enumerate(entries):
        path = option_path("tiers", index)
        spec = _read_tier(entry, where, path, mistakes)
        if spec is None:
            continue
        if spec.name in owners:
            mistakes.add(
                f"{where}: option '{path}.name': two tiers are named {spec.name!r}, this one and "
                f"{owners[spec.name]}; name one of them, for example '{spec.name}-2'"
            )
        owners.setdefault(spec.name, path)
        specs[path] = spec
    for path, fault in location_conflicts(specs):
        mistakes.add(f"{where}: option {path!r}: {specs[path].name!r} {fault}")
    return list(specs.values())


def _read_tier(entry: object, where: str, path: str, mistakes: _Mistakes) -> TierSpec | None:
    spec: TierSpec | None
    if isinstance(entry, TierSpec):
        spec = entry
    else:
        options = {"url": entry} if isinstance(entry, str) else entry
        spec = mistakes.caught(lambda: _read_entry(options, where, path))
    if spec is not None:
        policy = spec.runner.store_policy
        option = option_path(path, "store_policy")
        mistakes.caught(lambda: load_store_policy(policy), f"{where}: option {option!r}: ")
    return spec


def _read_entry(options: Any, where: str, path: str) -> TierSpec:
    _check_table(options, where, path)
    if list(options.values()) == [None]:
        (scheme,) = options
        raise ConfigError(
            f"{where}: option {path!r} is a table without a 'type'; if it is meant as a URL, in "
            f"YAML write quotes: '{scheme}:'"
        )
    try:
        return TierSpec.from_options(options, where=where, path=path)
    except BackendError as error:
        option = option_path(path, backend_option(options))
        raise ConfigError(f"{where}: option {option!r}: {error}") from error
