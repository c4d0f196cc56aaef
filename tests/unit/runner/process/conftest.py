"""A process runner around a misbehaving tier, closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runners import Rig
from support.tier_process import HeldBackClock


@pytest.fixture
def clock() -> HeldBackClock:
    return HeldBackClock()


@pytest.fixture
def make_rig(tmp_path: Path, clock: HeldBackClock) -> Iterator[Callable[..., Rig]]:
    """Make a process runner around a misbehaving tier; the test's end closes it."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rigs.append(Rig("process", tmp_path, **{"clock": clock, **options}))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
