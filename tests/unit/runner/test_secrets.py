"""No secret of a tier's options leaves its runner, whatever the tier does with it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.runners import Rig

from kvtier_sdk import TierAuthError
from kvtier_sdk.runner.jobs import Operation

SECRET = "hunter2 & sons"
TROUBLES = ["quote_secret", "wrap_secret", "log_secret", "lose_task"]
MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(make_rig: MakeRig) -> MakeRig:
    """Make a runner around a scripted tier with a secret."""
    return partial(make_rig, secret_key=SECRET)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """No line of a log shows a secret, by any logger."""
    caplog.set_level(logging.DEBUG)
    yield caplog
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("trouble", ["quote_secret", "wrap_secret"])
def test_opening_shows_no_secret(make_rig: MakeRig, trouble: str) -> None:
    rig = make_rig(on_open=trouble)
    with pytest.raises(Exception, match=r"\*\*\*") as told:
        rig.client.open()
    shown = "".join(traceback.format_exception(told.value))
    assert "hunter2" not in shown
    if trouble == "quote_secret":
        assert type(told.value) is TierAuthError
        assert str(told.value) == "held open: ERR AUTH *** called without a password"


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_result_and_the_log_show_no_secret(
    make_rig: MakeRig, trouble: str, log: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_lookup=trouble, on_load=trouble, runner={"breaker_failures": 1})
    rig.client.open()
    for operation in (Operation.LOOKUP, Operation.LOAD):
        rig.do(operation, 0)
        assert "hunter2" not in str(rig.results[-1])
    if trouble == "quote_secret":
        assert rig.results[0].error == "held lookup: ERR AUTH *** called without a password"
    if trouble == "wrap_secret":
        assert rig.results[0].error == "held lookup: raised WrapError: ['***']"
    rig.client.close(5.0)
    assert "***" in log.text


@pytest.mark.parametrize("trouble", TROUBLES[:-1])
def test_closing_shows_no_secret(
    make_rig: MakeRig, trouble: str, log: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_close=trouble)
    rig.client.open()
    rig.client.close(5.0)
    assert "***" in log.text
