"""A checker refuses a tier with a wrong signature, and none that is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TIERS = Path(__file__).parents[1] / "typing" / "tiers.py"


def test_wrong_signatures_are_refused_and_right_ones_are_not(tmp_path: Path) -> None:
    options = ["--strict", "--config-file=", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(TIERS)],
        cwd=TIERS.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    found = re.findall(r"tiers\.py:(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE)
    assert {(int(line), code) for line, code in found} == marked(), done.stdout


def marked() -> set[tuple[int, str]]:
    """Line and code of each complaint that is wanted."""
    lines = enumerate(TIERS.read_text().splitlines(), 1)
    wanted = ((number, re.search(r"# E: ([\w-]+)$", line)) for number, line in lines)
    return {(number, found[1]) for number, found in wanted if found}
