"""The lines that commands print on the terminal."""

from __future__ import annotations

import logging
import sys

from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.secrets import MaskingFormatter


def say(*lines: str, to_stderr: bool = False) -> None:
    """Print lines, escaped so that foreign text cannot move the cursor or start a line."""
    for line in lines:
        # Flush into pipes too, because the next line may have to wait for a tier.
        print(one_line(line), file=sys.stderr if to_stderr else sys.stdout, flush=True)


class TerminalFormatter(MaskingFormatter):
    """Formats log records for the terminal, escaped: libraries log text that a store has sent."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(one_line, super().format(record).split("\n")))
