"""The memcached example stays small, and runs from its wheel."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.author import ROOT, environment_of, run, stranger

pytestmark = pytest.mark.reader

EXAMPLE = ROOT / "examples" / "kvtier-memcached"


def test_the_tier_is_under_150_lines() -> None:
    tier = EXAMPLE / "kvtier_memcached" / "__init__.py"
    assert len(tier.read_text().splitlines()) < 150


def test_it_keeps_the_contract(wheels: Path, tmp_path: Path) -> None:
    python = environment_of(EXAMPLE, wheels, tmp_path)
    printed = run([python, "-P", "-m", "pytest"], tmp_path, stranger(wheels))
    assert " passed" in printed
    assert "failed" not in printed
    assert "no hook" not in printed
