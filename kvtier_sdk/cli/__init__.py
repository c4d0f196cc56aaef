"""The ``kvtier`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command; what it needs beyond the core is the extra ``cli``."""
    try:
        from kvtier_sdk.cli.app import run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(
            f"kvtier: the command needs {error.name}: pip install 'kvtier-sdk[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    sys.exit(run())
