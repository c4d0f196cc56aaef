"""The ``kvtier`` command."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command; print how to install the extra ``cli`` if it is missing."""
    try:
        from kvtier_sdk.cli.app import run

        sys.exit(run())
    except KeyboardInterrupt:
        # Shells report this status for a command that was ended by SIGINT.
        sys.exit(128 + signal.SIGINT)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(
            f"kvtier: the command needs {error.name}: pip install 'kvtier-sdk[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
