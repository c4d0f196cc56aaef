from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.author import run
from support.core import pure_core_only
from support.public import exported_by

import kvtier_sdk
import kvtier_sdk.engine
import kvtier_sdk.testing

MODULES = [kvtier_sdk, kvtier_sdk.engine, kvtier_sdk.testing]
PUBLIC = {name: getattr(module, name) for module in MODULES for name in exported_by(module)}
CLASSES = {name: found for name, found in PUBLIC.items() if inspect.isclass(found)}


def names_imported_by(source: str) -> set[str]:
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvtier_sdk")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def public_callables() -> Iterator[tuple[str, Callable[..., Any], str]]:
    for name, found in PUBLIC.items():
        if inspect.isfunction(found):
            yield name, found, inspect.getdoc(found) or ""
    for name, owner in CLASSES.items():
        for attribute in sorted(dir(owner)):
            if attribute.startswith(("_", "test_")):
                continue
            bases = [vars(base)[attribute] for base in owner.__mro__ if attribute in vars(base)]
            functions = [getattr(base, "__func__", base) for base in bases]
            functions = [found for found in functions if inspect.isfunction(found)]
            if functions and functions[0].__module__.startswith("kvtier_sdk"):
                prose = "\n".join(inspect.getdoc(function) or "" for function in functions)
                yield f"{name}.{attribute}", functions[0], prose


def unnamed_parameters(function: Callable[..., Any], prose: str) -> list[str]:
    return [
        parameter
        for parameter in inspect.signature(function).parameters
        if parameter not in ("self", "cls") and not re.search(rf"\b{parameter}\b", prose)
    ]


def unnamed_attributes(owner: type) -> list[str]:
    bases = [base for base in owner.__mro__ if base.__module__.startswith("kvtier_sdk")]
    prose = "\n".join(vars(base).get("__doc__") or "" for base in bases)
    names = {name for base in bases for name in inspect.get_annotations(base)}
    if dataclasses.is_dataclass(owner):
        # A metric's description is in its field's metadata.
        names -= {field.name for field in dataclasses.fields(owner) if field.metadata}
    return sorted(
        name
        for name in names
        if not name.startswith("_")
        and name != "model_config"
        and not re.search(rf"\b{name}\b", prose)
    )


def is_explained(name: str, source: str) -> bool:
    """Return true if a ``#:`` comment stands above the constant or its group of constants."""
    found = re.search(rf"^{name}\b[^=\n]*=", source, re.MULTILINE)
    if found is None:
        return False
    above = re.split(r"\n\n", source[: found.start()])[-1]
    return "#:" in above


CALLABLES = list(public_callables())


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_a_package_exports_exactly_what_it_imports(module: ModuleType) -> None:
    source = Path(module.__file__ or "").read_text()
    assert sorted(exported_by(module)) == sorted(names_imported_by(source))


def test_no_name_has_two_homes() -> None:
    assert not {*exported_by(kvtier_sdk)} & {*exported_by(kvtier_sdk.engine)}


@pure_core_only
@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_public_class_its_attributes_and_its_properties_are_explained(name: str) -> None:
    prose = inspect.getdoc(CLASSES[name]) or ""
    # Without a docstring, a dataclass's ``__doc__`` is its signature.
    assert prose
    assert not prose.startswith(f"{name}(")
    assert unnamed_attributes(CLASSES[name]) == []
    for attribute, found in inspect.getmembers_static(CLASSES[name]):
        if isinstance(found, property) and not attribute.startswith("_"):
            module = getattr(found.fget, "__module__", "")
            if module.startswith("kvtier_sdk"):
                assert inspect.getdoc(found), f"{name}.{attribute} has no docstring"


@pure_core_only
@pytest.mark.parametrize(("name", "function", "prose"), CALLABLES, ids=[c[0] for c in CALLABLES])
def test_a_public_function_is_explained(
    name: str, function: Callable[..., Any], prose: str
) -> None:
    assert prose.strip(), f"{name} has no docstring"
    assert unnamed_parameters(function, prose) == []


def test_a_public_constant_is_explained() -> None:
    sources = [path.read_text() for path in Path(kvtier_sdk.__file__).parent.rglob("*.py")]
    constants = [name for name in PUBLIC if name not in {*CLASSES, *(c[0] for c in CALLABLES)}]
    assert {"CONTRACT_VERSION", "METRICS", "Bytes"} <= set(constants)
    assert [name for name in constants if not any(is_explained(name, of) for of in sources)] == []


@pytest.mark.parametrize("module", ["kvtier_sdk", "kvtier_sdk.engine"])
def test_importing_a_public_module_brings_nothing_heavy_along(module: str, tmp_path: Path) -> None:
    heavy = [
        "torch",
        "vllm",
        "typer",
        "rich",
        "uvloop",
        "yaml",
        "prometheus_client",
        "opentelemetry",
    ]
    if module == "kvtier_sdk":
        heavy.append("kvtier_sdk.tiering")
    code = f"import {module}, sys; print([name for name in {heavy} if name in sys.modules])"
    assert run([sys.executable, "-P", "-c", code], tmp_path) == "[]\n"


def test_the_workers_names_are_found_when_they_are_asked_for() -> None:
    pytest.importorskip("torch")
    for name in exported_by(kvtier_sdk.engine):
        assert getattr(kvtier_sdk.engine, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'OffloadWorkers'"):
        kvtier_sdk.engine.OffloadWorkers  # noqa: B018
