from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest

from kvtier_sdk.admin import AdminSocket
from kvtier_sdk.cli.terminal import TerminalFormatter
from kvtier_sdk.cli.top import top_command

SAID = "disk [/red]\x1b[2K\r\x9b\x07\u202e\nforged"
COUNTERS = ("hit_chunks", "found_chunks", "absent_chunks", "loaded_bytes", "stored_bytes")


def test_a_sockets_text_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = itertools.count(1)
    tier = {"name": SAID, "failures": {}, "dropped": {}, "errors": [SAID], "error_age_s": 3.0}
    tier |= dict.fromkeys(COUNTERS, 0)
    tier |= {"saved_tokens": {SAID: 7}, "saved_prefill_s": {SAID: 0.5}, "compress_s": 0}
    tier |= {"used_chunks": 40, "used_bytes": 3 * 2**30, "capacity_bytes": None}
    tier |= {"free_bytes": 12 * 2**30, "options": {SAID: [SAID, f"{SAID} now"]}}
    status = {
        "pid": SAID,
        "idle_s": 0.0,
        "trace": None,
        "pool": {"slots": 1, "free": 1, "pinned": 0},
        "host": tier,
        "tiers": [tier],
    }
    path = tmp_path / "engine.sock"
    with AdminSocket(path, lambda *_: {**status, "uptime_s": float(next(looks))}):
        top_command(path, interval="1ms", once=True)
    text = capsys.readouterr().out
    assert "last error, 3 s ago: disk" in text
    assert text.count(r"disk [/red]\x1b[2K\r\x9b\x07\u202e\nforged") == 14
    assert "forged: 40 chunks, 3 GiB, disk has 12 GiB free\n" in text
    assert text.replace("\n", "").isprintable()


def test_a_library_that_logs_a_stores_text_moves_no_cursor() -> None:
    text = "redis://u:hidden@h said %s\nall of it"
    record = logging.makeLogRecord({"msg": text, "args": ("no\x1b[2K\ryes",)})
    shown = "redis://u:***@h said no\\x1b[2K\\ryes\nall of it"
    assert TerminalFormatter().format(record) == shown
