from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos.places import CannotHappenError
from support.chaos.play import BRIEF, play
from support.chaos.scenarios import Scenario, scenarios

#: ``make test`` plays only these scenarios. ``make chaos`` plays all.
ALWAYS = {
    "body_cut-redis-thread",
    "child_killed-file-process",
    "file_system_full-file-thread",
    "server_killed-redis-process",
}


def marks(scenario: Scenario) -> list[pytest.MarkDecorator]:
    return [] if str(scenario) in ALWAYS else [pytest.mark.chaos]


@pytest.mark.parametrize(
    "scenario", [pytest.param(one, id=str(one), marks=marks(one)) for one in scenarios()]
)
def test_a_fault_costs_misses_and_nothing_else(scenario: Scenario, tmp_path: Path) -> None:
    try:
        outcome = play(scenario, tmp_path, BRIEF)
    except CannotHappenError as error:
        pytest.skip(str(error))
    assert outcome.breaches() == []
