"""Finds ``kubectl``, whose kustomize needs no cluster."""

from __future__ import annotations

import shutil
from pathlib import Path

_UNPACKED = Path(__file__).parents[2] / ".kubectl" / "usr" / "bin"


def program() -> str:
    found = shutil.which("kubectl") or shutil.which("kubectl", path=_UNPACKED)
    assert found is not None, "kubectl is missing: try 'make kubectl'"
    return found
