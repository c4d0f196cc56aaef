"""Faults of real servers and file systems under load, each with its tier in a thread or a process.

Most of them are played by ``make chaos`` only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chaos.places import CannotHappenError
from support.chaos.play import BRIEF, play
from support.chaos.scenarios import Scenario, scenarios

#: Played with all other tests: one of each kind of place, a broken link, and a dead process.
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
