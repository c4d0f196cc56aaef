"""Runs programs with a private /dev/shm of a given size."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def run_with_shm(size_bytes: int, program: str) -> None:
    """Run a program with a private /dev/shm; skip the test if namespaces are not allowed."""
    unshare = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    mount = f"mount -t tmpfs -o size={size_bytes} tmpfs /dev/shm"
    if subprocess.run([*unshare, "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace of its own: 'unshare --mount' is refused here")
    done = subprocess.run(
        [*unshare, "sh", "-c", f"{mount} && exec {sys.executable} -P -"],
        input=textwrap.dedent(program),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(TESTS)},
    )
    assert done.returncode == 0, done.stderr
