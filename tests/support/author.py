"""Virtual environments in which tests act as a backend author, with wheels but no source tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(package: Path, into: Path) -> Path:
    with tempfile.TemporaryDirectory(dir=into) as place:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place]
        run([*command, str(package)], into)
        (wheel,) = Path(place).glob("*.whl")
        return wheel.rename(into / wheel.name)


def stranger(wheels: Path) -> dict[str, str]:
    """Return the environment variables of a user who has our wheels but no source tree."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    }
    # Skip pip's compilation, because only a few of the installed modules are ever imported.
    ours = {"PIP_OPTIONS": f"--find-links {wheels}", "PIP_NO_COMPILE": "1"}
    return kept | ours | {"PYTHON": sys.executable}


def environment_of(example: Path, wheels: Path, directory: Path) -> str:
    """Install an example in a new environment; copy its tests; return the environment's Python."""
    wheel = build_wheel(example, wheels)
    venv.create(directory / "env")
    python = str(directory / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    wanted = f"{example.name}[test] @ file://{wheel}"
    run([*pip, "--find-links", str(wheels), wanted, "kvtier-sdk[cli]"], directory)
    shutil.copytree(example / "tests", directory / "tests")
    shutil.copy(example / "pyproject.toml", directory)
    return python


def run(
    command: list[str] | str, directory: Path, environment: Mapping[str, str] | None = None
) -> str:
    done = subprocess.run(
        ["bash", "-euc", command] if isinstance(command, str) else command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}"
    return done.stdout
