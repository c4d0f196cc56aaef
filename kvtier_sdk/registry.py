"""Backends and policies of installed packages, found through their entry points.

Looking around imports nothing: names come from the packages' metadata, and only what is asked for
by name is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from kvtier_sdk.config import nearest
from kvtier_sdk.contract import (
    CONTRACT_VERSION,
    EvictionPolicy,
    SecondaryTierManager,
    StorePolicy,
)
from kvtier_sdk.errors import (
    BackendLoadError,
    ConfigError,
    DuplicateBackendError,
    UnknownBackendError,
)

#: Entry-point groups. ``kvtier.url_schemes`` holds further URL schemes of a backend
#: (``rediss = "kvtier_redis:RedisTier"``), so that a scheme is resolved without an import.
BACKENDS_GROUP = "kvtier.backends"
POLICIES_GROUP = "kvtier.policies"
STORE_POLICIES_GROUP = "kvtier.store_policies"
URL_SCHEMES_GROUP = "kvtier.url_schemes"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """An installed backend, as its package's metadata describes it.

    Attributes:
        name: what it is chosen by.
        distribution: the package that brings it.
        version: that package's version.
        target: ``module:class``.
    """

    name: str
    distribution: str
    version: str
    target: str


def available_backends() -> list[BackendInfo]:
    """List the installed backends, without importing any.

    Returns:
        One entry an entry point, sorted by name; a duplicate name is listed twice.
    """
    return sorted(
        (_describe(found) for found in entry_points(group=BACKENDS_GROUP)),
        key=lambda info: (info.name, info.distribution),
    )


def load_backend(name: str) -> type[SecondaryTierManager]:
    """Import the backend of a name, and nothing else.

    Args:
        name: a backend's name, or one of its further URL schemes.

    Returns:
        The tier class.

    Raises:
        UnknownBackendError: no installed package offers it; the message lists those that are.
        DuplicateBackendError: two packages offer it; the message names both.
        BackendLoadError: it cannot be imported, is no :class:`SecondaryTierManager`, or was
            written for another version of the contract; the message names package and version.
    """
    found = list(entry_points(group=BACKENDS_GROUP, name=name)) or list(
        entry_points(group=URL_SCHEMES_GROUP, name=name)
    )
    if not found:
        names = {info.name for info in available_backends()}
        raise UnknownBackendError(f"no backend {name!r}; {nearest(name, names, 'installed')}")
    backend = _load(found, "backend")
    info = _describe(found[0])
    if not (isinstance(backend, type) and issubclass(backend, SecondaryTierManager)):
        raise BackendLoadError(
            f"{_title('backend', info)}: {info.target} is not a subclass of "
            "kvtier_sdk.SecondaryTierManager"
        )
    version = getattr(backend, "contract_version", None)
    if version != CONTRACT_VERSION:
        raise BackendLoadError(
            f"{_title('backend', info)}: it declares contract_version {version!r}; this release "
            f"of kvtier-sdk speaks {CONTRACT_VERSION}. Install releases that fit each other"
        )
    return backend


def load_policy(name: str) -> type[EvictionPolicy]:
    """Import the eviction policy of a name, and nothing else.

    Args:
        name: for example ``"lru"``.

    Returns:
        The policy class; it is made without arguments.

    Raises:
        UnknownBackendError: no installed package offers it.
        DuplicateBackendError: two packages offer it.
        BackendLoadError: it cannot be imported or is no :class:`EvictionPolicy`.
    """
    return _load_policy(POLICIES_GROUP, "policy", name, EvictionPolicy)  # type: ignore[type-abstract]


def load_store_policy(text: str) -> StorePolicy:
    """Make the store policy that a tier's option names.

    Args:
        text: the policy's name, and for some a colon and an argument: ``"after_hits:2"``.

    Returns:
        The policy.

    Raises:
        ConfigError: the argument is missing or wrong.
        UnknownBackendError: no installed package offers the policy.
        DuplicateBackendError: two packages offer it.
        BackendLoadError: it cannot be imported or is no :class:`StorePolicy`.
    """
    name, colon, argument = text.partition(":")
    policy = _load_policy(STORE_POLICIES_GROUP, "store policy", name, StorePolicy)  # type: ignore[type-abstract]
    try:
        return policy(argument if colon else None)
    except ValueError as error:
        raise ConfigError(f"store policy {text!r}: {error}") from None


def _load_policy(group: str, kind: str, name: str, base: type[T]) -> type[T]:
    found = list(entry_points(group=group, name=name))
    if not found:
        names = {found.name for found in entry_points(group=group)}
        raise UnknownBackendError(f"no {kind} {name!r}; {nearest(name, names, 'installed')}")
    policy = _load(found, kind)
    if not (isinstance(policy, type) and issubclass(policy, base)):
        info = _describe(found[0])
        raise BackendLoadError(
            f"{_title(kind, info)}: {info.target} is not a subclass of kvtier_sdk.{base.__name__}"
        )
    return policy


def _load(found: Sequence[EntryPoint], kind: str) -> object:
    if len(found) > 1:
        owners = " and ".join(
            f"{info.distribution} {info.version}" for info in sorted(map(_describe, found), key=str)
        )
        raise DuplicateBackendError(
            f"{kind} {found[0].name!r} is offered by {owners}; uninstall one of them"
        )
    try:
        return found[0].load()
    except Exception as error:  # whatever a stranger's module does at import
        info = _describe(found[0])
        raise BackendLoadError(
            f"{_title(kind, info)} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def _describe(found: EntryPoint) -> BackendInfo:
    distribution = found.dist
    return BackendInfo(
        name=found.name,
        distribution=distribution.name if distribution else "unknown",
        version=distribution.version if distribution else "unknown",
        target=found.value,
    )


def _title(kind: str, info: BackendInfo) -> str:
    return f"{kind} {info.name!r} of {info.distribution} {info.version}"
