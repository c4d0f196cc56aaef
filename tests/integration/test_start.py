"""Tiers of one engine open at the same time."""

from __future__ import annotations

from pathlib import Path

from support.live import live
from support.runners import misbehaving


def test_tiers_open_side_by_side(tmp_path: Path, runner: str) -> None:
    specs = [
        misbehaving(runner, tmp_path / "diary", name=name, on_open="meet") for name in ("a", "b")
    ]
    with live(specs) as engine:
        assert [tier.is_open for tier in engine.manager.stats[1:]] == [1, 1]
