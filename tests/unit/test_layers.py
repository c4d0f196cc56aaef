"""Modules import only lower layers, and use the SDK's clock for time and tasks."""

from __future__ import annotations

import ast
import graphlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.public import exported_by

import kvtier_sdk
import kvtier_sdk.engine

PACKAGE = Path(kvtier_sdk.__file__).parent
ROOT = PACKAGE.parent


def read_ranks(page: str) -> dict[str, int]:
    ranks = {}
    for layer, rooms in re.findall(r"^\| (\d+) \| ([^|]*) \|", page, re.MULTILINE):
        for room in re.findall(r"`(\w+)`", rooms):
            ranks[room if room == "kvtier_sdk" else f"kvtier_sdk.{room}"] = int(layer)
    return ranks


RANKS = read_ranks((Path(__file__).parents[2] / "docs" / "architecture.md").read_text())
STRANGERS = frozenset({("kvtier_sdk.tiering", "kvtier_sdk.worker")})
ONLY_IN = {
    "cryptography": ("kvtier_sdk.codecs",),
    # kvtier_sglang needs torch, because SGLang passes KV pages as tensors.
    "torch": ("kvtier_sdk.worker", "kvtier_sglang"),
    "vllm": ("kvtier_vllm",),
    "lmcache": ("kvtier_lmcache",),
    "sglang": ("kvtier_sglang",),
    "prometheus_client": ("kvtier_sdk.exporter",),
    "zmq": ("kvtier_sdk.event_publisher",),
    "typer": ("kvtier_sdk.cli", "kvtier_vllm.tools"),
    "rich": ("kvtier_sdk.cli",),
}
#: The modules from which backends may import, each with its public names.
FOR_BACKENDS = {"kvtier_sdk": frozenset(exported_by(kvtier_sdk))}
FOR_ENGINES = {**FOR_BACKENDS, "kvtier_sdk.engine": frozenset(exported_by(kvtier_sdk.engine))}
# Calls that only clock.py may make. Methods in CLOCK_METHODS are forbidden on any object.
_CLOCK_CALLS = {
    "time": "monotonic monotonic_ns perf_counter perf_counter_ns process_time process_time_ns "
    "sleep thread_time thread_time_ns time time_ns",
    "asyncio": "create_task ensure_future sleep timeout timeout_at wait_for",
    "threading": "Timer",
}
CLOCK_CALLS = {f"{of}.{name}" for of, names in _CLOCK_CALLS.items() for name in names.split()}
CLOCK_METHODS = frozenset({"create_task", "call_later"})
OBSERVATION = frozenset({"time.thread_time_ns", "time.perf_counter"})
MAY_OBSERVE = "kvtier_sdk.cli.replay"
#: The command line may import the test kit, because "kvtier conformance" runs the kit.
MAY_TEST = ("kvtier_sdk.testing", "kvtier_sdk.cli")
CLOCK_OWNERS = ("kvtier_sdk.aio.clock", "kvtier_sdk.testing")


@dataclass(frozen=True)
class Import:
    line: int
    module: str
    name: str | None = None


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def home_of(module: str) -> str | None:
    if module in RANKS:
        return module
    homes = [home for home in RANKS if home != "kvtier_sdk" and is_in(module, home)]
    return max(homes, key=len) if homes else None


def imports_of(source: str, module: str) -> Iterator[Import]:
    package = module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join(parts[: len(parts) - node.level + 1])
                origin = f"{base}.{origin}" if origin else base
            for alias in node.names:
                yield Import(node.lineno, origin, alias.name)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            target = node.args[0]
            if called in ("import_module", "__import__") and isinstance(target, ast.Constant):
                yield Import(node.lineno, str(target.value))


def heavy_breaches(imported: Import, module: str) -> list[str]:
    root = imported.module.partition(".")[0]
    homes = ONLY_IN.get(root, (module,))
    if any(is_in(module, allowed) for allowed in homes):
        return []
    return [f"{module}:{imported.line}: imports {root}; only {' and '.join(homes)} may"]


def import_breaches(source: str, module: str) -> list[str]:
    home = home_of(module)
    if home is None:
        return [f"{module}: the table of layers does not know it"]
    found = []
    for imported in imports_of(source, module):
        where = f"{module}:{imported.line}"
        found += heavy_breaches(imported, module)
        if not is_in(imported.module, "kvtier_sdk"):
            continue
        target = imported.module
        if imported.name is not None and f"{target}.{imported.name}" in RANKS:
            target = f"{target}.{imported.name}"
        target_home = home_of(target)
        if target_home is None:
            found.append(f"{where}: imports {target}, which the table of layers does not know")
            continue
        if RANKS[target_home] > RANKS[home]:
            found.append(f"{where}: imports upward, {target}")
        if target_home == "kvtier_sdk.testing" and home not in MAY_TEST:
            found.append(f"{where}: imports {target}, which is for tests")
        if (home, target_home) in STRANGERS or (target_home, home) in STRANGERS:
            found.append(f"{where}: imports {target}; they meet only in an engine's package")
    return found


def clock_breaches(source: str, module: str) -> list[str]:
    if any(is_in(module, owner) for owner in CLOCK_OWNERS):
        return []
    forbidden = CLOCK_CALLS - OBSERVATION if is_in(module, MAY_OBSERVE) else CLOCK_CALLS
    tree = ast.parse(source)
    aliases = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name] = alias.name
        elif isinstance(node, ast.ImportFrom):
            found += [
                f"{module}:{node.lineno}: {node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in forbidden
            ]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if (
            f"{aliases.get(owner, owner)}.{node.attr}" in forbidden
            or node.attr in CLOCK_METHODS
            or (node.attr == "call_at" and "loop" in ast.unparse(node.value).lower())
        ):
            found.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
    return found


def package_breaches(source: str, module: str, public: Mapping[str, frozenset[str]]) -> list[str]:
    own = module.partition(".")[0]
    found = []
    for imported in imports_of(source, module):
        where = f"{module}:{imported.line}"
        found += heavy_breaches(imported, module)
        root = imported.module.partition(".")[0]
        if root == own or not root.startswith("kvtier_"):
            continue
        if imported.module not in public or imported.name is None:
            allowed = " or ".join(f"'from {name} import ...'" for name in public)
            found.append(f"{where}: imports {imported.module}; write {allowed}")
        elif imported.name not in public[imported.module]:
            found.append(f"{where}: {imported.name} of {imported.module} is not public")
    return found


def modules_under(root: Path) -> list[tuple[str, Path]]:
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


SDK_MODULES = modules_under(PACKAGE)
PACKAGES = [
    (package, public)
    for side, public in (("backends", FOR_BACKENDS), ("engines", FOR_ENGINES))
    for package in sorted((ROOT / side).glob("*/kvtier_*"))
    if package.is_dir()
]


def test_imports_run_downward_only() -> None:
    found = [
        breach
        for module, path in SDK_MODULES
        for breach in import_breaches(path.read_text(), module)
    ]
    assert found == []


def test_time_and_tasks_go_through_the_clock() -> None:
    found = [
        breach
        for module, path in SDK_MODULES
        for breach in clock_breaches(path.read_text(), module)
    ]
    assert found == []


def imports_at_once(source: str, module: str, names: set[str]) -> set[str]:
    tree = ast.parse(source)
    later = (ast.FunctionDef, ast.AsyncFunctionDef)
    tree.body = [
        node
        for node in tree.body
        if not isinstance(node, later)
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    ]
    found = {f"{one.module}.{one.name}" for one in imports_of(ast.unparse(tree), module)}
    found |= {one.module for one in imports_of(ast.unparse(tree), module)}
    return {one for one in found & names if not is_in(module, one)}


@pytest.mark.parametrize(
    "modules",
    [SDK_MODULES, *(modules_under(package) for package, _ in PACKAGES)],
    ids=["kvtier_sdk", *(package.name for package, _ in PACKAGES)],
)
def test_no_imports_go_in_a_circle(modules: list[tuple[str, Path]]) -> None:
    names = {name for name, _ in modules}
    imports = {name: imports_at_once(path.read_text(), name, names) for name, path in modules}
    graphlib.TopologicalSorter(imports).prepare()


def test_no_class_is_longer_than_600_lines() -> None:
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, path in SDK_MODULES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert {name: length for name, length in lengths.items() if length > 600} == {}


@pytest.mark.parametrize(("package", "public"), PACKAGES, ids=[one.name for one, _ in PACKAGES])
def test_backends_and_engines_import_public_names_only(
    package: Path, public: Mapping[str, frozenset[str]]
) -> None:
    found = [
        breach
        for module, path in modules_under(package)
        for breach in package_breaches(path.read_text(), module, public)
    ]
    assert found == []


def test_every_package_and_module_is_seen() -> None:
    names = {package.name for package, _ in PACKAGES} | {name for name, _ in SDK_MODULES}
    assert {"kvtier_file", "kvtier_vllm", "kvtier_sdk", "kvtier_sdk.policies.lru"} <= names


@pytest.mark.parametrize(
    ("module", "source", "said"),
    [
        ("kvtier_sdk.types", "from kvtier_sdk.aio.clock import Clock", "upward"),
        ("kvtier_sdk.types", "import kvtier_sdk.aio.clock", "upward"),
        ("kvtier_sdk.namespace", "from . import contract", "upward"),
        ("kvtier_sdk.namespace", "from .contract import TierContext", "upward"),
        ("kvtier_sdk.runner.loop", "from ..tiering import TieringManager", "upward"),
        ("kvtier_sdk.pool.layout", "def f():\n    from kvtier_sdk.runner import x", "upward"),
        ("kvtier_sdk.pool.layout", "importlib.import_module('kvtier_sdk.runner')", "upward"),
        ("kvtier_sdk", "from kvtier_sdk.engine import TierClient", "upward"),
        ("kvtier_sdk.helpers", "", "does not know"),
        ("kvtier_sdk.cli", "import kvtier_sdk.helpers", "does not know"),
        ("kvtier_sdk.tiering.manager", "import torch", "only"),
        ("kvtier_sdk.worker.copier", "from vllm.config import VllmConfig", "only"),
        ("kvtier_sdk.engine.tools", "def f():\n    from rich.table import Table", "only"),
        ("kvtier_sdk.metrics", "if TYPE_CHECKING:\n    import torch", "only"),
        ("kvtier_sdk.opening", "import kvtier_sdk.testing", "for tests"),
        ("kvtier_sdk.tiering.x", "from kvtier_sdk.worker import x", "meet"),
        ("kvtier_sdk.worker.x", "from kvtier_sdk.tiering import x", "meet"),
    ],
)
def test_an_import_that_a_layer_may_not_make_is_caught(module: str, source: str, said: str) -> None:
    assert any(said in breach for breach in import_breaches(source, module))


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.time()",
        "import time as t\nt.perf_counter()",
        "import time\nnow = time.monotonic",
        "from time import sleep",
        "import asyncio\nasync def f():\n    await asyncio.sleep(1)",
        "from asyncio import wait_for as w",
        "asyncio.get_running_loop().call_later(1, f)",
        "self._loop.call_at(1, f)",
        "async with asyncio.TaskGroup() as group:\n    group.create_task(x)",
        "from threading import Timer",
    ],
)
def test_a_way_around_the_clock_is_caught(source: str) -> None:
    if source.startswith("async with"):
        source = "async def f():\n" + "\n".join(f"    {line}" for line in source.splitlines())
    assert clock_breaches(source, "kvtier_sdk.runner.loop") != []
    assert clock_breaches(source, "kvtier_sdk.testing.virtual_clock") == []


def test_replay_may_observe_but_not_wait() -> None:
    source = "import time\ntime.perf_counter()\ntime.thread_time_ns()"
    assert clock_breaches(source, "kvtier_sdk.cli.replay.report") == []
    assert len(clock_breaches(source, "kvtier_sdk.tiering.manager")) == 2
    assert clock_breaches("import time\ntime.sleep(1)", "kvtier_sdk.cli.replay.report") != []


@pytest.mark.parametrize(
    "source",
    [
        "import kvtier_sdk",
        "from kvtier_sdk.errors import TierError",
        "from kvtier_sdk import errors",
        "from kvtier_sdk import _hidden",
        "def f():\n    from kvtier_sdk.testing import VirtualClock",
        "from kvtier_redis import RedisTier",
        "import vllm",
        "from kvtier_sdk.engine import TierClient",
    ],
)
def test_a_backend_that_imports_more_is_caught(source: str) -> None:
    assert package_breaches(source, "kvtier_file.tier", FOR_BACKENDS) != []
