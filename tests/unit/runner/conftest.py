"""A tier's loop over a scripted tier, checked and closed at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.scripted_loop import Act, Rig


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    """Make a loop over a scripted tier; at the end no rule may have been broken."""
    rigs: list[Rig] = []

    def build(*script: Act, **options: Any) -> Rig:
        rigs.append(Rig(*script, **options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()
