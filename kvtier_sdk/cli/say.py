"""Lines of a command on the terminal."""

from __future__ import annotations

import logging
import sys

from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.secrets import MaskingFormatter


def say(*lines: str, to_stderr: bool = False) -> None:
    """Print lines. Text of others in them moves no cursor, and begins no line of its own."""
    for line in lines:
        # Flushed into a pipe too: the next line may take as long as a tier does.
        print(one_line(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)


class TerminalFormatter(MaskingFormatter):
    """Formats a log's records for the terminal: libraries log what a store sent them."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(one_line, super().format(record).split("\n")))
