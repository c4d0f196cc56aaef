"""A backend author's machine: a released kvtier-sdk, and an environment without the source."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def build_wheel(package: Path, into: Path) -> Path:
    """Build a package's wheel."""
    before = set(into.glob("*.whl"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(into)]
    run([*command, str(package)], into)
    (wheel,) = set(into.glob("*.whl")) - before
    return wheel


def stranger(wheels: Path) -> dict[str, str]:
    """Return the environment of a user who has our wheels in a directory, but no source tree."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
    }
    return kept | {"PIP_OPTIONS": f"--find-links {wheels}", "PYTHON": sys.executable}


def run(
    command: list[str] | str, directory: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command, or text for bash, that has to succeed, and return its output."""
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
