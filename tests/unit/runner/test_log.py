from __future__ import annotations

import logging

import pytest

from kvtier_sdk.runner.log import QUIET_S, TierLog
from kvtier_sdk.testing import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return said


def test_every_line_names_the_tier(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    TierLog("disk", clock).warning("is %d %% full", 99)
    assert caplog.record_tuples == [("kvtier.tier.disk", logging.WARNING, "disk: is 99 % full")]


def test_what_comes_often_is_said_at_once_and_then_counted(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    log = TierLog("disk", clock)
    for number in range(1000):
        log.often(logging.WARNING, "late", f"disk store: late {number}")
    assert lines(caplog) == ["disk store: late 0"]
    log.often(logging.WARNING, "other", "disk load: 100 % late")
    assert lines(caplog) == ["disk load: 100 % late"], "another topic, and no format"
    clock.advance(QUIET_S)
    log.often(logging.WARNING, "late", "disk store: again")
    assert lines(caplog) == ["disk store: again (1000 of this kind since the last)"]
    log.often(logging.WARNING, "late", "disk store: the last")
    assert lines(caplog) == []
    log.catch_up()
    assert lines(caplog) == ["disk store: the last"]
    log.catch_up()
    assert lines(caplog) == []
