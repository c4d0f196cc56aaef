"""Lines of a command on the terminal."""

from __future__ import annotations

import sys

from kvtier_sdk.options.text import one_line


def say(*lines: str, to_stderr: bool = False) -> None:
    """Print lines. Text of others in them moves no cursor, and begins no line of its own."""
    for line in lines:
        # Flushed into a pipe too: the next line may take as long as a tier does.
        print(one_line(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)
