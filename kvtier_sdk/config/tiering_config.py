"""The configuration of a manager: its host pool, its policies and its tiers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, Self

from pydantic import Field, InstanceOf, JsonValue, field_validator, model_validator

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.event_publisher import EventOptions
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.model import Live, StrictModel, validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.secrets import masked
from kvtier_sdk.options.units import Bytes, BytesOrShare, Count, Flag, Seconds, Share
from kvtier_sdk.registry import load_policy


class PoolOptions(StrictModel):
    """The options of the host pool and its policies.

    Attributes:
        slots: number of chunks in the host pool.
        pool_bytes: size of the host pool (``64GiB``), or the pool's share of the machine's memory
            (``25%``), instead of ``slots``.
        chunk_bytes: payload of a chunk; not needed if the engine determines this size.
        policy: eviction policy of the pool: ``returns``, ``lru``, ``arc`` or another package's.
        store_reserve: share of the slots reserved for stores, and not used for loads from tiers. If
            a tier gets chunks just before their eviction, the manager also keeps this share free.
        recompute_s: time that the engine needs to recompute a chunk; a chunk that a tier would
            load more slowly is a miss. If absent, the manager measures the time.
        hint_budget: maximum size of the chunks that pins and other hints hold, in bytes or as a
            share of the pool, at most half; ``0`` refuses these hints.
        hint_duration_s: the longest time for which hints can hold a chunk.
        verify: false turns digests off; for measurements and tests only.
    """

    slots: Count | None = Field(None, ge=1)
    pool_bytes: BytesOrShare | None = Field(None, gt=0)
    chunk_bytes: Bytes | None = Field(None, gt=0)
    policy: str = "returns"
    store_reserve: Share = Field(0.1, lt=1)
    recompute_s: Seconds | None = Field(None, alias="recompute", gt=0)
    hint_budget: Live[BytesOrShare] = Field(0.25, ge=0)
    hint_duration_s: Live[Seconds] = Field(3600.0, alias="hint_duration", gt=0)
    verify: Flag = True

    def hint_share(self, pool_bytes: int) -> float:
        """Return ``hint_budget`` as a share of ``pool_bytes``, at most a half."""
        budget = self.hint_budget
        return float(min(budget / pool_bytes if isinstance(budget, int) else budget, 0.5))


class ServiceOptions(EventOptions):
    """The options of an engine's tiers that do not depend on the host pool.

    Attributes:
        namespace: additional facts, such as ``{"model": "my-model", "revision": "v2"}``. Stored
            chunks are reused only if all facts are equal. An engine adds its own facts.
        metrics_port: port of the metrics endpoint; no endpoint if absent.
        metrics_host: address of the metrics endpoint.
        shutdown_timeout_s: time limit for draining each tier, and again for closing it.
    """

    namespace: Mapping[str, JsonValue] = Field(default_factory=dict)
    metrics_port: Count | None = Field(None, ge=1, le=65535)
    metrics_host: str = "127.0.0.1"
    shutdown_timeout_s: Seconds = Field(10.0, alias="shutdown_timeout")


class TieringConfig(ServiceOptions, PoolOptions):
    """The configuration of a manager: the host pool, the policies and the secondary tiers.

    Create a configuration with :meth:`from_dict` or :meth:`from_file`. Exactly one of ``slots`` and
    ``pool_bytes`` is required.

    Attributes:
        trace_dir: directory for a block-hash trace of all requests; no trace if absent.
        trace_file_bytes: size at which a trace file ends and the next file begins.
        trace_files: number of trace files to keep; the oldest files are removed.
        admin_socket: path of a Unix socket for ``kvtier top``, ``set``, ``drain`` and ``tier rm``,
            or of a directory for the sockets of several engines; ``auto`` is ``/tmp/kvtier-UID``,
            which only its user can enter. No socket if absent. The history of events is beside it.
        events_tokens: true to announce chunks with their tokens, which routers such as Dynamo's
            need. The tiers then store the chunks' tokens too, sealed if the tier has a ``codec``.
        tiers: the secondary tiers, in the order of lookups. Each tier is a URL, or a table with
            ``type``, an optional ``name``, and a ``url`` or options.
    """

    trace_dir: str | None = Field(None, min_length=1)
    trace_file_bytes: Bytes = Field(64 * 2**20, alias="trace_file_size", gt=0)
    trace_files: Count = Field(4, ge=1)
    admin_socket: str | None = Field(None, min_length=1)
    events_tokens: Flag = False
    tiers: tuple[InstanceOf[TierSpec], ...] = ()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any], *, where: str = "configuration") -> Self:
        """Build a configuration from a mapping of options, and import its backends and policies.

        ``tiers`` is a list of URLs, tables and specs. Each error message begins with ``where``.

        Raises:
            ConfigError: an option is wrong; the message has a line for each mistake.
        """
        place = Place(where)
        own = place.table(options)
        tiers = cls._option("tiers")  # adapters give this option another name
        entries = own.pop(tiers, [])
        mistakes: list[str] = []
        with _noting(mistakes):
            config = validate_options(cls, own, place)
        with _noting(mistakes):
            specs = read_tiers(place.at(tiers).entries(entries))
        if mistakes:
            raise ConfigError("\n".join(mistakes))
        return config.model_copy(update={"tiers": tuple(specs.values())})

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read the file ``path``: TOML (``.toml``), JSON or, with the extra ``yaml``, YAML.

        Raises:
            ConfigError: the file cannot be read or parsed, or an option is wrong.
        """
        return cls.from_dict(read_options(Path(path)), where=str(path))

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """Return the options as plain data that :meth:`from_dict` reads.

        ``secrets`` shows secrets in the clear, and ``defaults`` adds the unset options.
        """
        plain = self.model_copy(update={"tiers": ()})
        given = super(TieringConfig, plain).to_dict(secrets=secrets, defaults=defaults)
        tiers = [spec.to_dict(secrets=secrets, defaults=defaults) for spec in self.tiers]
        return given | ({"tiers": tiers} if tiers else {})

    def for_rank(self, rank: int) -> Self:
        """Return a copy with a separate metrics port for the data-parallel replica ``rank``."""
        port = self.metrics_port
        return self if port is None else self.model_copy(update={"metrics_port": port + rank})

    def bind(self, namespace: Namespace) -> Namespace:
        """Add the configured facts to an engine's ``namespace``.

        Raises:
            ConfigError: a configured fact differs from the engine's.
        """
        for name in sorted(self.namespace.keys() & namespace.facts.keys()):
            ours, theirs = self.namespace[name], namespace.facts[name]
            if ours != theirs:
                raise ConfigError(
                    f"option 'namespace.{name}' is {masked(name, ours)!r}, but the engine says "
                    f"{masked(name, theirs)!r}; leave it out"
                )
        return Namespace({**namespace.facts, **self.namespace})

    @field_validator("admin_socket")
    @classmethod
    def _find_socket(cls, path: str | None) -> str | None:
        return None if path is None else str(place_of_socket(path))

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, policy: str) -> str:
        try:
            load_policy(policy)
        except BackendError as error:
            raise ValueError(str(error)) from None
        return policy

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


def own_directory() -> Path:
    """Return the default directory for the sockets of a user's engines."""
    # Avoid XDG_RUNTIME_DIR, which services lack, and which is removed when the user logs out.
    return Path(f"/tmp/kvtier-{os.geteuid()}")


def place_of_socket(option: str) -> Path:
    """Return the option's path, made absolute because the process may change its directory."""
    return own_directory() if option == "auto" else Path(option).absolute()


def read_tiers(entries: Mapping[Place, object]) -> dict[Place, TierSpec]:
    """Read the configured tiers. Each of the ``entries`` is a URL, a table or a spec.

    If one tier rounds chunks, the chunks in all tiers may be rounded: an engine stores loaded
    chunks, and chunks computed from them, in the other tiers too.

    Raises:
        ConfigError: an entry is invalid, a name is repeated, or locations conflict; the message
            has a line for each mistake.
    """
    mistakes: list[str] = []
    owners = {PRIMARY: "the host pool"}
    specs: dict[Place, TierSpec] = {}
    for place, entry in entries.items():
        with _noting(mistakes):
            spec = specs[place] = _read_tier(entry, place)
            owner = owners.setdefault(spec.name, place.path)
            if owner != place.path:
                raise ConfigError(
                    f"{place.at('name')}: two tiers are named {spec.name!r}, this one and {owner}; "
                    f"name one of them, for example '{spec.name}-2'"
                )
    mistakes += _location_conflicts(specs)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    is_rounded = any(spec.is_rounded for spec in specs.values())
    return {place: replace(spec, is_rounded=is_rounded) for place, spec in specs.items()}


def _read_tier(entry: object, place: Place) -> TierSpec:
    if isinstance(entry, TierSpec):
        return entry
    options = place.table({"url": entry} if isinstance(entry, str) else entry)
    if list(options.values()) == [None]:
        (scheme,) = options
        raise ConfigError(
            f"{place} is a table without a 'type'; if it is meant as a URL, in YAML write "
            f"quotes: '{scheme}:'"
        )
    return TierSpec.from_options(options, where=place.where, path=place.path)


@contextmanager
def _noting(mistakes: list[str]) -> Iterator[None]:
    """Add an error of the ``with`` block to ``mistakes``, so that all are reported together."""
    try:
        yield
    except (BackendError, ConfigError) as error:
        mistakes.append(str(error))


def _location_conflicts(specs: Mapping[Place, TierSpec]) -> Iterator[str]:
    """Yield messages about tiers in one location with different options, or in nested locations."""
    # In nested locations, the outer tier could count or remove the inner tier's chunks.
    for (one_place, one), (place, tier) in combinations(specs.items(), 2):
        first, location = one.config.location(), tier.config.location()
        if first is None or location is None:
            continue
        keeps = f"{place}: {tier.name!r} keeps its chunks in {location}"
        other, apart = f"{one.name!r} ({one_place.path})", "give each a place of its own"
        if location == first and (different := _different_options(one, tier)):
            fault = f"and so does {other}, with other options ({different})"
            yield f"{keeps}, {fault}: {apart}, or both the same options"
        for relation, inner, outer in (("inside", location, first), ("around", first, location)):
            if inner != outer and inner.startswith(outer.rstrip("/") + "/"):
                yield f"{keeps}, {relation} {first}, where {other} keeps its own: {apart}"


def _different_options(one: TierSpec, other: TierSpec) -> str:
    if one.tier_class is not other.tier_class:
        return "another backend"
    ours, theirs = (tier.config.model_dump(by_alias=True) for tier in (one, other))
    return ", ".join(option for option in ours if ours[option] != theirs[option])
