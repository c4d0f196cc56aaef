"""The operator's afternoon ends as its page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.reader

ROOT = Path(__file__).parents[2]


def told(text: str) -> list[str]:
    return re.findall(r"^(?:(?:## |\$ kvtier |NOT SO).*|[A-Z][^:\n]*\.)$", text, re.MULTILINE)


def test_the_afternoon_is_as_its_page_says() -> None:
    command = [sys.executable, str(ROOT / "examples" / "afternoon.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (ROOT / "docs" / "afternoon.md").read_text()
    assert told(page[page.index("\n## ") :]) == told(done.stdout)
