"""Text of others on the terminal."""

from __future__ import annotations

import logging

from kvtier_sdk.cli.terminal import TerminalFormatter


def test_a_library_that_logs_a_stores_text_moves_no_cursor() -> None:
    text = "redis://u:hidden@h said %s\nall of it"
    record = logging.makeLogRecord({"msg": text, "args": ("no\x1b[2K\ryes",)})
    shown = "redis://u:***@h said no\\x1b[2K\\ryes\nall of it"
    assert TerminalFormatter().format(record) == shown
