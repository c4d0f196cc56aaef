"""``__all__`` is exact, and what it offers is explained."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvtier_sdk

PUBLIC = {name: getattr(kvtier_sdk, name) for name in kvtier_sdk.__all__}
CLASSES = {name: found for name, found in PUBLIC.items() if inspect.isclass(found)}


def names_imported_by(source: str) -> set[str]:
    return {
        alias.asname or alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def public_callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    """Every public function and method of ours, with all the prose about it."""
    for name, found in PUBLIC.items():
        if inspect.isfunction(found):
            yield name, found, inspect.getdoc(found) or ""
    for name, owner in CLASSES.items():
        for attribute in sorted(dir(owner)):
            if attribute.startswith("_"):
                continue
            bases = [vars(base)[attribute] for base in owner.__mro__ if attribute in vars(base)]
            functions = [getattr(base, "__func__", base) for base in bases]
            functions = [found for found in functions if inspect.isfunction(found)]
            if functions and functions[0].__module__.startswith("kvtier_sdk"):
                prose = "\n".join(inspect.getdoc(function) or "" for function in functions)
                yield f"{name}.{attribute}", functions[0], prose


def unnamed_parameters(function: Callable[..., Any], prose: str) -> list[str]:
    """The parameters that a function's docstring does not mention."""
    return [
        parameter
        for parameter in inspect.signature(function).parameters
        if parameter not in ("self", "cls") and not re.search(rf"\b{parameter}\b", prose)
    ]


CALLABLES = list(public_callables())


def test_all_has_no_duplicates_and_is_sorted() -> None:
    names = kvtier_sdk.__all__
    assert len(set(names)) == len(names)
    # Constants, then classes, then functions: the order that ruff keeps.
    kinds = [0 if name.isupper() else 1 if name[0].isupper() else 2 for name in names]
    assert kinds == sorted(kinds)
    for kind in range(3):
        group = [name for name, of in zip(names, kinds, strict=True) if of == kind]
        assert group == sorted(group)


def test_all_is_exactly_what_the_package_imports() -> None:
    source = Path(kvtier_sdk.__file__).read_text()
    assert set(kvtier_sdk.__all__) == names_imported_by(source)


def test_a_private_import_is_not_counted_as_public() -> None:
    assert names_imported_by("from a import B as C, d, _e\nimport f") == {"C", "d"}


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_public_class_is_explained(name: str) -> None:
    prose = inspect.getdoc(CLASSES[name]) or ""
    # A dataclass without a docstring gets its signature for one.
    assert prose
    assert not prose.startswith(f"{name}(")


@pytest.mark.parametrize(("name", "function", "prose"), CALLABLES, ids=[c[0] for c in CALLABLES])
def test_a_public_function_is_explained(
    name: str, function: Callable[..., Any], prose: str
) -> None:
    assert prose.strip(), f"{name} has no docstring"
    assert unnamed_parameters(function, prose) == []


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_public_property_is_explained(name: str) -> None:
    for attribute, found in inspect.getmembers_static(CLASSES[name]):
        if isinstance(found, property) and not attribute.startswith("_"):
            module = getattr(found.fget, "__module__", "")
            if module.startswith("kvtier_sdk"):
                assert inspect.getdoc(found), f"{name}.{attribute} has no docstring"


def test_the_methods_of_the_contract_are_among_those_checked() -> None:
    names = {name for name, _, _ in CALLABLES}
    assert {"SecondaryTierManager.store", "MemoryTier.load", "TierSpec.from_url"} <= names


def test_an_unnamed_parameter_is_caught() -> None:
    def function(named: int, *args: int, forgotten: int) -> None:
        """Does with named and args what they say."""

    assert unnamed_parameters(function, function.__doc__ or "") == ["forgotten"]
