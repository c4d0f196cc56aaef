"""The public names of packages."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType


def exported(package: Path) -> list[str]:
    """Return ``__all__`` if it exists, and otherwise the names imported like ``name as name``."""
    names: list[str] = []
    # Walk the whole module, because names that need an extra are imported under TYPE_CHECKING.
    for node in ast.walk(ast.parse((package / "__init__.py").read_text())):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
        if isinstance(node, ast.ImportFrom):
            names += [alias.name for alias in node.names if alias.asname == alias.name]
    if not names:
        raise AssertionError(f"{package} exports nothing")
    return names


def exported_by(module: ModuleType) -> list[str]:
    return exported(Path(module.__file__ or "").parent)
