"""The backends, policies and codecs of installed packages, found through their entry points."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from typing import NamedTuple, TypeVar, cast

from kvtier_sdk.contract import (
    CONTRACT_VERSION,
    ChunkCodec,
    EvictionPolicy,
    SecondaryTierManager,
    StorePolicy,
)
from kvtier_sdk.core_form import CORE
from kvtier_sdk.errors import (
    BackendLoadError,
    ConfigError,
    DuplicateBackendError,
    UnknownBackendError,
)
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place, closest, nearest, one_line
from kvtier_sdk.options.tier import RunnerOptions, TierConfig

#: Entry-point groups. ``kvtier.url_schemes`` names a backend's further URL schemes
#: (``rediss = "kvtier_redis:RedisTier"``), so that resolving a scheme needs no import.
BACKENDS_GROUP = "kvtier.backends"
URL_SCHEMES_GROUP = "kvtier.url_schemes"

#: Maps a backend's name or URL scheme to the package of this project that provides it.
_PUBLISHED = {
    "file": "kvtier-file",
    "mooncake": "kvtier-mooncake",
    **dict.fromkeys(("redis", "rediss", "redis+unix"), "kvtier-redis"),
    "s3": "kvtier-s3",
    **dict.fromkeys(("obstore", "gs", "az"), "kvtier-obstore"),
}

T = TypeVar("T")

# Methods that must be coroutine functions, if a tier's class defines them.
_METHODS = (
    *("open", "lookup", "store", "load", "close", "delete", "touch", "usage"),
    *("contains_chunk", "store_chunk", "load_chunk"),
)


@dataclass(frozen=True, order=True, slots=True)
class BackendInfo:
    """The metadata of an installed backend.

    Attributes:
        name: the backend's name in a configuration.
        distribution: the package that provides the backend.
        version: the package's version.
        target: the tier's class, as ``module:class``.
    """

    name: str
    distribution: str
    version: str
    target: str


def available_backends() -> list[BackendInfo]:
    """List the installed backends by name, without importing any; duplicates are listed too."""
    return sorted(found.info for found in _entry_points(BACKENDS_GROUP))


def load_backend(name: str) -> type[SecondaryTierManager]:
    """Return the tier class of the backend with this ``name`` or URL scheme.

    ``my-tier`` also finds ``my_tier``, because a URL's scheme cannot contain ``_``.

    Raises:
        UnknownBackendError: no installed package offers the name; the message lists all names.
        DuplicateBackendError: two packages offer the name, as a backend's name or as a URL scheme.
        BackendLoadError: the backend cannot be imported, or does not implement this version of
            the contract; the message names the package, its version and the problem.
    """
    found = _find_backend(name)
    if not found:
        raise unknown_backend(name)
    backend = _load(found, "backend")
    check_backend(backend, found[0].info)
    return cast(type[SecondaryTierManager], backend)


def check_backend(backend: object, info: BackendInfo) -> None:
    """Raise :class:`BackendLoadError` if the class ``backend`` breaks the contract."""
    fault = _fault_of(backend, info)
    if fault is not None:
        raise BackendLoadError(f"{_title('backend', info)}: {fault}")


def unknown_backend(name: str) -> UnknownBackendError:
    names = {info.name for info in available_backends()}
    advice = ""
    if name in _PUBLISHED:
        advice = f"pip install {_PUBLISHED[name]}; "
    elif closest(name, names) is None:
        advice = "install the package that provides it; "
    return UnknownBackendError(f"no backend {name!r}; {advice}{nearest(name, names, 'installed')}")


@cache
def build_facts(backend: str, contract_version: int = CONTRACT_VERSION) -> tuple[str, ...]:
    """Return the label values of ``kvtier_build_info`` that follow the tier's name."""
    found = _find_backend(backend)
    backend_version = found[0].info.version if found else ""
    return (backend, backend_version, version("kvtier-sdk"), str(contract_version), CORE)


def backend_name(name: str) -> str:
    """Return the name of the backend with this name or URL scheme, or an unknown name as it is."""
    found = _find_backend(name)
    if not found:
        return name
    _check_one(found, "backend")
    target = found[0].info.target
    backends = [one.info for one in _entry_points(BACKENDS_GROUP) if one.info.target == target]
    return backends[0].name if backends else name


def url_schemes(info: BackendInfo) -> list[str]:
    """Return the backend's URL schemes: its name with ``-`` for ``_``, then its further schemes."""
    schemes = [one.info for one in _entry_points(URL_SCHEMES_GROUP)]
    further = [scheme.name for scheme in schemes if scheme.target == info.target]
    return [info.name.replace("_", "-"), *sorted(further)]


def load_policy(name: str) -> type[EvictionPolicy]:
    """Return the class of the eviction policy ``name``; raise BackendError if it is unusable."""
    return _load_class("kvtier.policies", "policy", name, EvictionPolicy)  # type: ignore[type-abstract]


def load_store_policy(text: str) -> StorePolicy:
    """Create the store policy that ``text`` describes, such as ``"after_hits:2"``.

    Raises:
        ConfigError: the argument is missing or wrong.
        BackendError: the policy cannot be found or loaded, or is not a :class:`StorePolicy`.
    """
    return _make("kvtier.store_policies", "store policy", text, StorePolicy)  # type: ignore[type-abstract]


def load_codec(text: str) -> ChunkCodec:
    """Create the codec that ``text`` describes, such as ``"aes-gcm:/etc/kvtier/chunk.keys"``.

    Raises:
        ConfigError: the argument is missing or wrong, or the codec's extra is not installed.
        BackendError: the codec cannot be found or loaded, or is not a :class:`ChunkCodec`.
    """
    return _make("kvtier.codecs", "codec", text, ChunkCodec)  # type: ignore[type-abstract]


def load_all(group: str, kind: str, base: type[T]) -> dict[str, T]:
    """Return an instance of each class of an entry-point group, by name."""
    names = sorted({found.info.name for found in _entry_points(group)})
    return {name: _load_class(group, kind, name, base)() for name in names}


class _Found(NamedTuple):
    info: BackendInfo
    point: EntryPoint


def _entry_points(group: str) -> list[_Found]:
    return _scan(group, tuple(sys.path))


# Reading all packages is slow, so the result is cached until ``sys.path`` changes.
@cache
def _scan(group: str, path: tuple[str, ...]) -> list[_Found]:
    found = []
    for point in entry_points(group=group):
        # Skip the leftovers of interrupted pip runs, whose metadata has no name.
        if point.dist is not None and "Name" in point.dist.metadata:
            info = BackendInfo(point.name, point.dist.name, point.dist.version, point.value)
            found.append(_Found(info, point))
    return found


def _find_backend(name: str) -> list[_Found]:
    form = name.replace("_", "-")
    owners: dict[tuple[str, str], _Found] = {}
    for found in _entry_points(BACKENDS_GROUP) + _entry_points(URL_SCHEMES_GROUP):
        if found.info.name.replace("_", "-") == form:
            # A package can list its backend's name as a URL scheme too, so drop repetitions.
            owners.setdefault((found.info.distribution, found.info.target), found)
    return list(owners.values())


def _fault_of(backend: object, info: BackendInfo) -> str | None:
    """Describe how the backend breaks the contract; return ``None`` if it does not."""
    if not (isinstance(backend, type) and issubclass(backend, SecondaryTierManager)):
        return f"{info.target} is not a subclass of kvtier_sdk.SecondaryTierManager"
    declared = getattr(backend, "contract_version", None)
    if declared != CONTRACT_VERSION:
        return (
            f"it declares contract_version {declared}, and kvtier-sdk {version('kvtier-sdk')} "
            f"supports {CONTRACT_VERSION}; install releases of both that fit each other"
        )
    missing = sorted(backend.__abstractmethods__)
    if missing:
        return f"{info.target} does not implement {', '.join(missing)}"
    for method in _METHODS:
        function = inspect.unwrap(getattr(backend, method, None))  # type: ignore[arg-type]
        # A compiled coroutine function cannot be recognized, so only Python functions are checked.
        if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
            return f"{info.target}.{method} is not a coroutine function; use 'async def {method}'"
    model = backend.config_model
    if not (isinstance(model, type) and issubclass(model, TierConfig)):
        return f"{info.target}.config_model is not a subclass of kvtier_sdk.TierConfig"
    if backend.runner_defaults:
        try:
            validate_options(RunnerOptions, backend.runner_defaults, Place("runner_defaults"))
        except ConfigError as error:
            return f"{info.target}: {error}"
    return None


def _make(group: str, kind: str, text: str, base: type[T]) -> T:
    name, colon, argument = text.partition(":")
    make: Callable[[str | None], T] = _load_class(group, kind, name, base)
    try:
        return make(argument if colon else None)
    except ValueError as error:
        raise ConfigError(f"{kind} {text!r}: {error}") from None


def _load_class(group: str, kind: str, name: str, base: type[T]) -> type[T]:
    installed = _entry_points(group)
    found = [one for one in installed if one.info.name == name]
    if not found:
        names = {one.info.name for one in installed}
        raise UnknownBackendError(f"no {kind} {name!r}; {nearest(name, names, 'installed')}")
    loaded, info = _load(found, kind), found[0].info
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        fault = f"is not a subclass of kvtier_sdk.{base.__name__}"
    elif missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        fault = f"does not implement {', '.join(missing)}"
    else:
        return loaded
    raise BackendLoadError(f"{_title(kind, info)}: {info.target} {fault}")


def _check_one(found: Sequence[_Found], kind: str) -> None:
    if len(found) > 1:
        owners = " and ".join(sorted(f"{of.distribution} {of.version}" for of, _ in found))
        raise DuplicateBackendError(
            f"{kind} {found[0].info.name!r} is offered by {owners}; uninstall one of them"
        )


def _load(found: Sequence[_Found], kind: str) -> object:
    _check_one(found, kind)
    try:
        return found[0].point.load()
    except ConfigError:  # the message already says what to install
        raise
    except (Exception, SystemExit) as error:  # another package's module may raise anything
        info = found[0].info
        raise BackendLoadError(
            f"{_title(kind, info)} cannot be imported: {type(error).__name__}: "
            f"{one_line(str(error))}; "
            f"install what it needs, or another release of {info.distribution}"
        ) from error


def _title(kind: str, info: BackendInfo) -> str:
    return f"{kind} {info.name!r} of {info.distribution} {info.version}"
