from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import runners, scripted_loop
from support.scripted_loop import Act


@pytest.fixture
def make() -> Iterator[scripted_loop.Make]:
    """Yield a function that makes rigs. Check at the end that the loops kept the contract."""
    rigs: list[scripted_loop.Rig] = []

    def build(*script: Act, **options: Any) -> scripted_loop.Rig:
        rigs.append(scripted_loop.Rig(*script, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


@pytest.fixture(params=runners.RUNNERS)
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[runners.Make]:
    with runners.rig_maker(request.param, tmp_path) as make:
        yield make
