"""Make a folder for checking kvtier_sdk.worker on a machine with a GPU but no network.

    python scripts/gpu_bundle.py [--no-wheels] [FOLDER]

The machine must have Python 3.12, torch and numpy. The folder contains kvtier-sdk and
kvtier-file in installed form, the tests in tests/gpu, the worker's benchmark, and run.py. It also
contains the packages that these require. On the machine, run.py starts the checks.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("tests/gpu", "tests/support/gpu", "benchmarks")
PACKAGES = (ROOT, ROOT / "backends/file")
PYTHON = "3.12"
#: The downloaded wheels run on x86-64 with glibc 2.17 or newer.
PLATFORM = "manylinux2014_x86_64"
#: Requirements left out, because the machine's own versions fit its torch.
LEFT_OUT = frozenset({"numpy"})
MAX_BYTES = 60 * 1024 * 1024


def make(folder: Path, *, wheels: bool) -> None:
    """Make the folder, replacing an older one. If ``wheels``, also download the requirements."""
    if folder.exists() and any(folder.iterdir()) and not (folder / "run.py").exists():
        raise SystemExit(f"{folder} holds something else: name another folder, or remove it")
    shutil.rmtree(folder, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    (folder / "tests/support/__init__.py").touch()
    shutil.copy(ROOT / "scripts/gpu_run.py", folder / "run.py")
    _pip_install(folder / "kvtier", "--no-build-isolation", "--no-deps", *map(str, PACKAGES))
    if wheels:
        system = ["--python-version", PYTHON, "--platform", PLATFORM, "--only-binary=:all:"]
        _pip_install(folder / f"python{PYTHON}", *system, *requirements())


def requirements() -> list[str]:
    declared = (ROOT / "requirements-dev.txt").read_text().splitlines()
    found = [line for line in declared if re.match(r"pytest(-asyncio)?\b(?!-)", line)]
    for package in PACKAGES:
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        found += project["dependencies"]
    ours = LEFT_OUT | {package.name for package in PACKAGES} | {"kvtier-sdk"}
    return sorted({line for line in found if re.split(r"[^\w.-]", line)[0] not in ours})


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _pip_install(into: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--no-compile", "--target", str(into), *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist/gpu-bundle")
    parser.add_argument("--no-wheels", action="store_true", help="download nothing")
    arguments = parser.parse_args()
    make(arguments.folder, wheels=not arguments.no_wheels)
    found_bytes = size_bytes(arguments.folder)
    print(f"{arguments.folder}: {found_bytes / 2**20:.1f} MiB; run.py in it runs the checks")
    if found_bytes > MAX_BYTES:
        raise SystemExit(f"that is more than {MAX_BYTES / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
