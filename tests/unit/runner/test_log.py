from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvtier_sdk.options.secrets import Secrets
from kvtier_sdk.runner.log import QUIET_S, TierLog
from kvtier_sdk.testing import VirtualClock


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


Said = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    def messages() -> list[str]:
        found = list(caplog.messages)
        caplog.clear()
        return found

    return messages


def test_a_frequent_message_is_counted(clock: VirtualClock, said: Said) -> None:
    log = TierLog("disk", clock)
    for number in range(1000):
        clock.advance(0.01)
        log.often(logging.WARNING, "late", f"disk store: late {number}")
    assert said() == ["disk store: late 0"]
    log.often(logging.WARNING, "other", "disk load: 100 % late")
    assert said() == ["disk load: 100 % late"], "another topic, and no format"
    clock.advance(QUIET_S)
    log.often(logging.WARNING, "late", "disk store: again")
    assert said() == ["disk store: again (1000 of this kind in 70 s)"]
    log.often(logging.WARNING, "late", "disk store: the last")
    assert said() == []
    log.catch_up()
    assert said() == ["disk store: the last"]
    log.catch_up()
    assert said() == []


def test_handlers_see_no_secret_of_a_tier(
    clock: VirtualClock, said: Said, caplog: pytest.LogCaptureFixture
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
    logs[1].error("%d %%", 5)
    assert "hunter2" not in caplog.text
    assert "ValueError: ***" in caplog.text
    assert caplog.records[-1].args == (5,), "what holds no secret stays as it is"
    first, second, third, last = said()
    assert (first, second[:20], third) == ("with ***", "cannot log '%s of %s", "often ***")
    assert last == "masked: 5 %"
    assert len(logger.filters) == 1


def test_a_tier_that_is_gone_hides_nothing(clock: VirtualClock, said: Said) -> None:
    secrets = Secrets(["hunter2"])
    log = TierLog("gone", clock, secrets)
    del secrets
    log.warning("hunter2")
    assert said() == ["gone: hunter2"]


def test_the_count_is_logged_after_a_minute(clock: VirtualClock, said: Said) -> None:
    log = TierLog("disk", clock)

    async def run() -> None:
        for number in range(35):
            log.often(logging.WARNING, "late", f"disk lookup: late {number}")
        await clock.sleep(QUIET_S - 1)
        assert said() == ["disk lookup: late 0"]
        await clock.sleep(1)
        assert said() == ["disk lookup: late 34 (34 of this kind in 60 s, the last 60 s ago)"]
        await clock.sleep(2 * QUIET_S)
        assert said() == [], "nothing was late since"

    event_loop = clock.new_event_loop()
    event_loop.run_until_complete(run())
    event_loop.close()


def test_control_characters_in_log(clock: VirtualClock, caplog: pytest.LogCaptureFixture) -> None:
    log, said = TierLog("disk", clock), "\x1b[2K\r\x9b\x07\u202e\udc80\nERROR forged"
    log.warning("the server says %s", said)
    log.often(logging.WARNING, "late", said)
    try:
        raise OSError(said)
    except OSError:
        log.exception("failed")
    shown = r"\x1b[2K\r\x9b\x07\u202e\udc80"
    assert caplog.text.count(shown) == 3
    assert caplog.text.count("\n  ERROR forged") == 2


def test_held_back_messages_come_before_the_end(clock: VirtualClock, said: Said) -> None:
    log = TierLog("disk", clock)

    def say(topic: str, message: str, *, ends_outage: bool = False) -> None:
        log.often(logging.WARNING, topic, message, ends_outage=ends_outage)

    say("error", "disk store: refused")
    say("breaker", "disk: writes are refused")
    clock.advance(5)
    say("breaker", "disk: writes are refused; hangs")
    say("error", "disk store: hangs")
    clock.advance(3)
    say("error", "disk store: hangs still")
    clock.advance(4)
    said()
    say("recovery", "disk: writes are taken again", ends_outage=True)
    assert said() == [
        "disk: writes are refused; hangs (7 s ago)",
        "disk store: hangs still (2 of this kind in 12 s, the last 4 s ago)",
        "disk: writes are taken again",
    ]
    clock.advance(QUIET_S)
    log.catch_up()
    assert said() == []
