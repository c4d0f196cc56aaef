"""Tiers that misbehave, over a loop on virtual time and over both runners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import runners, scripted_loop
from support.scripted_loop import Act


@pytest.fixture
def make() -> Iterator[scripted_loop.Make]:
    """Make a loop over a scripted tier; at the end no rule may have been broken."""
    rigs: list[scripted_loop.Rig] = []

    def build(*script: Act, **options: Any) -> scripted_loop.Rig:
        rigs.append(scripted_loop.Rig(*script, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


@pytest.fixture(params=runners.RUNNERS)
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[runners.Make]:
    """Make a runner around a misbehaving tier; it is closed with the test."""
    with runners.rig_maker(request.param, tmp_path) as make:
        yield make
