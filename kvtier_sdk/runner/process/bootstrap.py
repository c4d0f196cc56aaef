"""Encodes errors, and the bootstrap message from which a process builds its tier.

The message contains secrets, so it is sent through a socket. Every user of the machine can read a
command line, and every child of the process can read the environment. So the environment omits the
variables with secrets. For a secret in a file, the message contains only the path.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from kvtier_sdk import errors
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import BackendLoadError, ConfigError, KVTierError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.secret_sources import VariableSecret
from kvtier_sdk.options.secrets import text_of_all
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.process.messages import PROTOCOL_VERSION

_OTHER_OPTIONS = (
    "a process of its own gets the options as plain data, in which these are not the same: give "
    "each as it would be written in a file"
)


def fault_of(spec: TierSpec) -> str | None:
    """Return the reason why a separate process cannot build the tier, or ``None`` if it can."""
    tier_class = spec.tier_class
    if tier_class.__module__ == "__main__" or "<locals>" in tier_class.__qualname__:
        return (
            f"a process of its own cannot import {_path_of(tier_class)}: define it in a module, "
            "outside of functions"
        )
    try:
        _options_of(spec)
    except (TypeError, ValueError):
        return _OTHER_OPTIONS
    return None


def write_bootstrap(
    spec: TierSpec, namespace: Namespace, layout: PoolLayout, pool_fd: int
) -> dict[str, Any]:
    """Return bootstrap data with secrets, for a tier that :func:`fault_of` accepts."""
    return {
        "version": PROTOCOL_VERSION,
        "name": spec.name,
        "backend": spec.backend,
        "tier_class": _path_of(spec.tier_class),
        **_options_of(spec),
        "variables": {
            option: (secret.variable, secret.get_secret_value())
            for option, secret in spec.config.model_dump(by_alias=True).items()
            if isinstance(secret, VariableSecret)
        },
        "facts": dict(namespace.facts),
        "fingerprint": namespace.fingerprint,
        "layout": asdict(layout),
        "pool_fd": pool_fd,
        "verify": spec.verify,
        "inventory": spec.inventory,
        "log_level": logging.getLogger(f"kvtier.tier.{spec.name}").getEffectiveLevel(),
    }


def read_bootstrap(bootstrap: Mapping[str, Any]) -> tuple[TierSpec, Namespace, PoolLayout]:
    """Decode bootstrap data; raise ConfigError if they would not restore the engine's settings."""
    name = bootstrap["name"]
    place = Place(f"tier {name!r}")
    if bootstrap["version"] != PROTOCOL_VERSION:
        raise ConfigError(
            f"{place} its process found another release of kvtier-sdk than the engine"
        )
    namespace = Namespace(bootstrap["facts"])
    if namespace.fingerprint != bootstrap["fingerprint"]:
        raise ConfigError(f"{place} the namespace's facts are not plain JSON values")
    path = bootstrap["tier_class"]
    module, _, qualname = path.partition(":")
    try:
        tier_class = attrgetter(qualname)(importlib.import_module(module))
    except Exception as error:  # a third-party module may raise anything at import
        raise BackendLoadError(
            f"tier {name!r}: {path} cannot be imported in a process of its own: "
            f"{type(error).__name__}: {error}; use runner 'thread'"
        ) from error
    secrets = {name: VariableSecret(*of) for name, of in bootstrap["variables"].items()}
    config = validate_options(tier_class.config_model, bootstrap["config"] | secrets, place)
    runner = validate_options(RunnerOptions, bootstrap["runner"], place)
    facts = {name: bootstrap[name] for name in ("verify", "inventory")}
    spec = TierSpec(name, bootstrap["backend"], tier_class, config, runner, **facts)
    if any(bootstrap[part] != options for part, options in _options_of(spec).items()):
        raise ConfigError(f"{place} {_OTHER_OPTIONS}, or use runner 'thread'")
    return spec, namespace, PoolLayout(**bootstrap["layout"])


def _options_of(spec: TierSpec) -> dict[str, Any]:
    return {part: getattr(spec, part).to_dict(secrets=True) for part in ("config", "runner")}


def write_error(error: BaseException) -> dict[str, Any]:
    """Encode an error as the nearest class in :mod:`kvtier_sdk.errors`."""
    ours = [base for base in type(error).__mro__ if base.__module__ == errors.__name__]
    if not ours:
        text = f"{type(error).__name__}: {text_of_all(error)}"
        return {"class": TierError.__name__, "text": text, "attributes": {}}
    return {
        "class": ours[0].__name__,
        # Omit the tier and the operation from a TierError's text, because they are sent separately.
        "text": str(error.args[0] if isinstance(error, TierError) else error),
        "attributes": {
            name: value
            for name, value in vars(error).items()
            if isinstance(value, str | int | float | None)
        },
    }


def read_error(told: Mapping[str, Any]) -> KVTierError:
    error: KVTierError = getattr(errors, told["class"])(told["text"])
    vars(error).update(told["attributes"])
    return error


def _path_of(of: type) -> str:
    return f"{of.__module__}:{of.__qualname__}"
