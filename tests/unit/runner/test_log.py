from __future__ import annotations

import logging

import pytest

from kvtier_sdk.options.secrets import Secrets
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


def test_no_handler_sees_a_secret_of_the_tier(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    secret, logger = "hunter2", logging.getLogger("kvtier.tier.masked")
    secrets = Secrets([secret])
    logs = [TierLog("masked", clock, secrets) for _ in range(2)]
    try:
        try:
            raise OSError(5, secret)
        except OSError as error:
            raise ValueError(secret) from error
    except ValueError:
        logger.exception("with %s", secret)
    logger.warning("%s of %s", secret)
    logs[0].often(logging.WARNING, "topic", f"often {secret}")
    logs[1].error("%d percent", 5)
    assert "hunter2" not in caplog.text
    assert "ValueError: ***" in caplog.text
    assert caplog.records[-1].args == (5,), "what holds no secret stays as it is"
    first, second, third, _ = lines(caplog)
    assert (first, second[:20], third) == ("with ***", "cannot log '%s of %s", "often ***")
    assert len(logger.filters) == 1


def test_a_tier_that_is_gone_hides_nothing_any_more(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = Secrets(["hunter2"])
    log = TierLog("gone", clock, secrets)
    del secrets
    log.warning("hunter2")
    assert lines(caplog) == ["gone: hunter2"]
