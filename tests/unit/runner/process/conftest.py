from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.runners import Make, rig_maker
from support.tier_process import HeldBackClock


@pytest.fixture
def clock() -> HeldBackClock:
    return HeldBackClock()


@pytest.fixture
def make_rig(tmp_path: Path, clock: HeldBackClock) -> Iterator[Make]:
    with rig_maker("process", tmp_path, clock=clock) as make:
        yield make
