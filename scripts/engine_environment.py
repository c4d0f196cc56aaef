"""Code shared by the scripts that create an engine's virtual environment for a CPU.

An environment's stamp files contain hashes of the files that define it. An up-to-date environment
is left unchanged.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

ROOT = Path(__file__).resolve().parents[1]
DEVELOPMENT = ROOT / "requirements-dev.txt"
PYTHON = (3, 11)
TORCH = "torch==2.13.0"

Pip: TypeAlias = Callable[..., None]


def requirements(wheel: Path) -> Iterator[tuple[str, str]]:
    """Yield each requirement's normalized name and its text; skip requirements of extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    for line in metadata.splitlines():
        if not line.startswith("Requires-Dist:"):
            continue
        requirement = line.removeprefix("Requires-Dist:").strip()
        project = re.match(r"[A-Za-z0-9._-]+", requirement)
        if project is not None and not re.search(r"\bextra\s*==", requirement):
            yield project[0].lower().replace("_", "-"), requirement


def our_packages() -> list[Path]:
    sides = ("backends", "engines")
    return [path.parent for side in sides for path in sorted(ROOT.glob(f"{side}/*/pyproject.toml"))]


def install_ours(pip: Pip) -> None:
    """Install this repository's packages in editable mode, and packages that their tests need."""
    own = [".[testing]", *map(str, our_packages()), "examples/kvtier-memcached"]
    packages = [part for package in own for part in ("-e", package)]
    lines = DEVELOPMENT.read_text().splitlines()
    wanted = ("aiofiles", "editables", "hatchling", "mooncake", "pytest-xdist", "rclone")
    peers = [line for line in lines if line.startswith(wanted)]
    pip("install", *peers)
    pip("install", "--no-build-isolation", *packages)


def make(engine: str, install_engine: Callable[[Pip], None], script: str) -> None:
    """Create the environment at the path on the command line, or update it after a change."""
    if sys.version_info[:2] < PYTHON:
        raise SystemExit(f"Python {PYTHON[0]}.{PYTHON[1]} or newer is needed")
    (path,) = sys.argv[1:]
    environment = Path(path).absolute()
    python = environment / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)

    def pip(command: str, *arguments: str) -> None:
        whole = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", command]
        if command == "install":
            # Do not compile modules, because most of them are never imported. Do not warn of
            # conflicts, because some requirements are omitted on purpose.
            whole += ["--no-compile", "--no-warn-conflicts"]
        subprocess.run([*whole, *arguments], check=True, cwd=ROOT)

    if not (environment / f".stamp-{engine}").exists():
        # A new pip resolves three times as fast as the pip bundled with Python.
        pip("install", "--upgrade", "pip")
    scripts = [Path(__file__), Path(script)]
    metadata = [package / "pyproject.toml" for package in (ROOT, *our_packages())]
    for name, install, sources in (
        (engine, install_engine, scripts),
        ("ours", install_ours, [*scripts, DEVELOPMENT, *metadata]),
    ):
        stamp = environment / f".stamp-{name}"
        wanted = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        if not stamp.exists() or stamp.read_text() != wanted:
            install(pip)
            stamp.write_text(wanted)
