from __future__ import annotations

import importlib.util
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.public import exported

ROOT = Path(__file__).parents[2]
PAGES = [page.read_text() for page in (ROOT / "docs" / "reference").glob("*.md")]
#: The SDK's public modules. A name that several modules export belongs to the first.
MODULES = [
    "kvtier_sdk",
    "kvtier_sdk.engine",
    "kvtier_sdk.testing",
    "kvtier_sdk.worker",
    "kvtier_sdk.cli.replay",
]
PACKAGES = [
    f"kvtier_{path.name}" for side in ("backends", "engines") for path in ROOT.glob(f"{side}/*/")
]


def directory_of(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def public_names() -> set[str]:
    found: set[str] = set()
    known: set[str] = set()
    for module in MODULES:
        package = directory_of(module)
        for name in set(exported(package)) - known:
            # mkdocstrings would document the module of the same name instead, so repeat the name.
            hidden = (package / f"{name}.py").exists()
            found.add(f"{module}.{name}.{name}" if hidden else f"{module}.{name}")
            known.add(name)
    for package_name in PACKAGES:
        found |= {f"{package_name}.{name}" for name in exported(directory_of(package_name))}
    return found


def faults(pages: Iterable[str], public: set[str]) -> dict[str, set[str]]:
    said = Counter(
        name for page in pages for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    )
    return {
        "missing": public - set(said),
        "twice": {name for name, times in said.items() if times > 1},
        "not public": set(said) - public,
    }


def test_each_public_name_stands_once_in_the_reference() -> None:
    found = faults(PAGES, public_names())
    assert found == {"missing": set(), "twice": set(), "not public": set()}


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="no checkout around the tests")
def test_the_files_to_touch_for_an_addition_exist() -> None:
    page = (ROOT / "docs" / "how-to-add.md").read_text()
    named = [name for name in re.findall(r"`([\w./-]+/[\w./-]+)`", page) if "NAME" not in name]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
