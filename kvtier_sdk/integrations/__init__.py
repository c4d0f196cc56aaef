"""Engines that the SDK runs under, one package each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def import_when_named(package: str, homes: Mapping[str, str]) -> Callable[[str], type]:
    """Return a module's ``__getattr__`` that imports its classes when an engine asks for them.

    Args:
        package: name of the package that the classes seem to be in.
        homes: name of each class to the module of the package that defines it.
    """

    def get_class(name: str) -> type:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: type = getattr(import_module(f"{package}.{home}"), name)
        return found

    return get_class
