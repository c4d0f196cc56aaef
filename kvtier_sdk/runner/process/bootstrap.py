"""What a tier's process builds the tier from: plain data, sent when it starts.

It goes through the socket that only the two processes have: it holds secrets, which everybody on
the machine could read in a command line, and every child of the tier in its environment.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import BackendLoadError, ConfigError, TierError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.options.tier import (
    RunnerOptions,
    TierConfig,
)
from kvtier_sdk.pool import PoolLayout
from kvtier_sdk.runner.process.codec import PROTOCOL_VERSION


def fault_of(spec: TierSpec) -> str | None:
    """Why a process of its own cannot build a tier, if so.

    Args:
        spec: the tier.

    Returns:
        A sentence for the user, or ``None``.
    """
    tier_class = spec.tier_class
    if tier_class.__module__ == "__main__" or "<locals>" in tier_class.__qualname__:
        return (
            f"a process of its own cannot import {_path_of(tier_class)}: define it in a module, "
            "outside of functions"
        )
    try:
        sent = json.loads(json.dumps([spec.config.to_dict(secrets=True), _common(spec)]))
        arrived = _read_options(spec.name, tier_class.config_model, *sent)
    except (TypeError, ValueError, ConfigError):
        arrived = None
    if arrived != (spec.config, spec.runner):
        return (
            "a process of its own gets the options as plain data, in which these are not the "
            "same: give each as it would be written in a file"
        )
    return None


def write_bootstrap(
    spec: TierSpec, *, namespace: Namespace, layout: PoolLayout, pool_fd: int, verify: bool
) -> dict[str, Any]:
    """Write down what the child needs.

    Args:
        spec: a tier without a fault (:func:`fault_of`).
        namespace: of its chunks.
        layout: of the pool.
        pool_fd: the pool's descriptor in the child.
        verify: whether digests are checked.

    Returns:
        Plain data, secrets included.
    """
    return {
        "version": PROTOCOL_VERSION,
        "name": spec.name,
        "backend": spec.backend,
        "tier_class": _path_of(spec.tier_class),
        "config": spec.config.to_dict(secrets=True),
        "runner": _common(spec),
        "facts": dict(namespace.facts),
        "fingerprint": namespace.fingerprint,
        "layout": asdict(layout),
        "pool_fd": pool_fd,
        "verify": verify,
        "log_level": logging.getLogger(f"kvtier.tier.{spec.name}").getEffectiveLevel(),
    }


def read_bootstrap(order: Mapping[str, Any]) -> tuple[TierSpec, Namespace, PoolLayout]:
    """Read what the parent wrote, in the child.

    Args:
        order: what arrived.

    Returns:
        The tier, its namespace, and where what lies in the pool.

    Raises:
        ConfigError: it is of another release, or not the same here.
        BackendLoadError: the backend cannot be imported here.
    """
    name = order["name"]
    if order["version"] != PROTOCOL_VERSION:
        raise ConfigError(
            f"tier {name!r}: its process found another release of kvtier-sdk than the engine"
        )
    namespace = Namespace(order["facts"])
    if namespace.fingerprint != order["fingerprint"]:
        raise ConfigError(f"tier {name!r}: the namespace's facts are no plain JSON values")
    tier_class = _load_class(name, order["tier_class"])
    config, runner = _read_options(name, tier_class.config_model, order["config"], order["runner"])
    spec = TierSpec(name, order["backend"], tier_class, config, runner)
    return spec, namespace, PoolLayout(**order["layout"])


def write_error(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: its class and that one's bases, and what it says."""
    return {
        "name": type(error).__name__,
        # That it is some exception says less than its name.
        "classes": [
            _path_of(base)
            for base in type(error).__mro__
            if base is type(error) or base is not Exception
        ],
        "text": _text_of(error),
        "args": [arg for arg in error.args if _is_plain(arg)],
        "attributes": {name: value for name, value in vars(error).items() if _is_plain(value)},
    }


def read_error(told: Mapping[str, Any]) -> BaseException:
    """The exception again: of the first of its classes that this process knows and can make.

    It is made of those of its arguments that are plain, or of its text, so that it says the same.
    Nothing is imported for it.

    Args:
        told: what :func:`write_error` wrote.

    Returns:
        The exception, to be raised; a :class:`TierError` with its name where no class will do.
    """
    for path in told["classes"]:
        found = _known_class(path)
        if found is None or not issubclass(found, Exception):
            continue
        for args in (told["args"], [told["text"]]):
            # Whatever a stranger's class does to be made, or to say something.
            with contextlib.suppress(Exception):
                error = found.__new__(found, *args)
                error.args = tuple(args)
                vars(error).update(told["attributes"])
                if str(error) == told["text"]:
                    return error
    return TierError(f"{told['name']}: {told['text']}")


def _text_of(error: BaseException) -> str:
    """What an exception says, and what those say that it is a group of."""
    if not isinstance(error, BaseExceptionGroup):
        return str(error)
    parts = (f"{type(part).__name__}: {_text_of(part)}" for part in error.exceptions)
    return f"{error}: {'; '.join(parts)}"


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float | None)


def _common(spec: TierSpec) -> dict[str, Any]:
    return spec.runner.to_dict(secrets=True)


def _read_options(
    name: str, model: type[TierConfig], config: Mapping[str, Any], runner: Mapping[str, Any]
) -> tuple[TierConfig, RunnerOptions]:
    where = f"tier {name!r}"
    return (
        validate_options(model, config, where=where),
        validate_options(RunnerOptions, runner, where=where),
    )


def _path_of(of: type) -> str:
    return f"{of.__module__}:{of.__qualname__}"


def _load_class(name: str, path: str) -> type[SecondaryTierManager]:
    module, _, qualname = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever a stranger's module does at import
        raise BackendLoadError(
            f"tier {name!r}: {path} cannot be imported in a process of its own: "
            f"{type(error).__name__}: {error}; use runner 'thread'"
        ) from error
    assert isinstance(found, type)
    return found


def _known_class(path: str) -> type[BaseException] | None:
    module, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
