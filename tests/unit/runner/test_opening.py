from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from support.live import live
from support.runners import RUNNERS, Make, Rig, misbehaving
from support.tier_process import children

from kvtier_sdk import (
    ConfigError,
    TierAuthError,
    TierContractError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvtier_sdk.metrics import metric_samples
from kvtier_sdk.runner import ProcessRunner, loop_thread
from kvtier_sdk.runner.jobs import Operation


@pytest.fixture
def make_rig(make_rig: Make) -> Make:
    def make(*, deadline_s: float = 20.0, required: bool = False, **script: Any) -> Rig:
        options = {
            "required": required,
            "open_deadline": deadline_s,
            "probe_interval": 0.01,
            "max_probe_interval": 0.02,
        }
        return make_rig(runner=options, **script)

    return make


def assert_refused(rig: Rig) -> None:
    assert not rig.client.takes_reads
    assert not rig.client.takes_stores
    seen = {sample.metric.name: sample.value for sample in metric_samples([rig.client.stats])}
    assert seen["kvtier_tier_open"] == 0
    assert seen["kvtier_read_breaker_open"] == seen["kvtier_store_breaker_open"] == 1


def wait_until_used(rig: Rig) -> None:
    rig.wait_open()
    assert rig.client.takes_reads
    assert rig.client.takes_stores
    assert rig.client.stats.is_open == 1
    assert rig.do(Operation.STORE, 0) == ["ok"]
    assert rig.do(Operation.LOOKUP, 0, 1) == ["ok", "not_found"]


def test_an_open_that_never_ends_keeps_no_engine_waiting(make_rig: Make) -> None:
    rig = make_rig(on_open="hang", deadline_s=0.2).open()
    assert_refused(rig)
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
    rig.wait_until(lambda: rig.client.stats.open_failures >= 2)
    assert "held open: it did not open within 0.2 s ('open_deadline')" in rig.client.stats.errors
    rig.client.close(10.0)
    past = rig.past()
    assert past.count("open") == past.count("cancelled") == past.count("closed") >= 2
    assert past[-2:] == ["cancelled", "closed"]
    assert children() == []
    rig.join()


@pytest.mark.parametrize("trouble", ["hang", "block"])
def test_a_required_tier_fails_at_the_deadline(make_rig: Make, trouble: str) -> None:
    rig = make_rig(on_open=trouble, deadline_s=0.2, required=True)
    with pytest.raises(TierTimeoutError) as told:
        rig.client.open()
    assert str(told.value) == "held open: it did not open within 0.2 s ('open_deadline')"
    assert children() == []
    assert rig.do(Operation.LOOKUP, 0) == ["cancelled"]


@pytest.mark.parametrize("required", [True, False])
def test_an_open_that_succeeds_after_the_end_is_closed(make_rig: Make, required: bool) -> None:
    rig = make_rig(on_open="block", deadline_s=0.2, required=required)
    if required:
        with pytest.raises(TierTimeoutError):
            rig.client.open()
    else:
        rig.client.open()
        rig.client.close(0.05)
    if isinstance(rig.runner, ProcessRunner):
        assert children() == [], "what it had opened went with it"
        return
    assert rig.past() == ["open", "blocking"]
    rig.unblock()
    rig.wait_past("closed")
    assert rig.past() == ["open", "blocking", "opened", "closed"]
    rig.join()


def test_an_open_that_blocks_its_thread_succeeds_late(make_rig: Make) -> None:
    rig = make_rig(on_open="block", deadline_s=0.2).open()
    assert_refused(rig)
    rig.wait_past("blocking")
    rig.unblock()
    wait_until_used(rig)
    assert rig.past() == ["open", "blocking", "opened"]
    assert rig.client.stats.restarts == 0


def test_an_open_that_holds_the_interpreter(make_rig: Make) -> None:
    rig = make_rig(on_open="hold_interpreter", deadline_s=0.2).open()
    wait_until_used(rig)


def test_an_open_that_fails_is_tried_again_with_an_instance_of_its_own(
    make_rig: Make, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_open="refuse_unless_third").open()
    assert_refused(rig)
    wait_until_used(rig)
    assert rig.client.stats.open_failures == 2
    assert rig.past() == ["open", "closed", "open", "closed", "open", "opened"]
    assert "held open: connection refused; the engine goes on, and tries again" in caplog.text
    assert "held: the tier is open now" in caplog.text


@pytest.mark.parametrize(
    ("trouble", "required", "error_class"),
    [
        ("misconfigure", False, ConfigError),
        ("expire", False, TierAuthError),
        ("misbehave", False, TierContractError),
        ("refuse_unless_third", True, TierUnavailableError),
    ],
)
def test_what_does_not_pass_by_itself_ends_the_start(
    make_rig: Make, trouble: str, required: bool, error_class: type[Exception]
) -> None:
    rig = make_rig(on_open=trouble, required=required)
    with pytest.raises(error_class):
        rig.client.open()
    assert rig.past() == ["open", "closed"]


def test_after_the_start_nothing_ends_the_attempts(make_rig: Make) -> None:
    rig = make_rig(on_open="fail_differently").open()
    wait_until_used(rig)
    assert rig.client.stats.errors == [
        "held open: connection refused",
        "held open: the key of Ada expired 3 days ago",
        "tier 'held': option 'bucket' names none",
        "held open: raised ZeroDivisionError: a bug",
    ]


@pytest.mark.parametrize("trouble", ["hang", "block"])
def test_an_engine_that_serves_waits_for_no_opening(make_rig: Make, trouble: str) -> None:
    rig = make_rig(on_open=trouble, deadline_s=3600.0, required=True, engine_waits=False).open()
    assert_refused(rig)
    rig.wait_past("open")
    if trouble == "block":
        rig.unblock()
        wait_until_used(rig)


def test_no_error_ends_the_attempts_of_an_engine_that_serves(make_rig: Make) -> None:
    rig = make_rig(on_open="expire_once", engine_waits=False).open()
    wait_until_used(rig)
    assert rig.client.stats.open_failures == 1
    assert rig.client.stats.errors == ["held open: the key of Ada expired 3 days ago"]


def test_the_log_says_that_an_opening_goes_on(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop_thread, "_PROGRESS_S", 0.05)
    rig = make_rig(on_open="block", deadline_s=0.5)
    with caplog.at_level(logging.WARNING, logger="kvtier.tier.held"):
        rig.client.open()
    lines = [r.getMessage() for r in caplog.records if "still opening" in r.getMessage()]
    told = [f"held: still opening after {waited} s" for waited in ("0.05", "0.1", "0.2", "0.4")]
    # On a busy machine, some of these lines may be missing.
    assert lines == [line for line in told if line in lines] != []


@pytest.mark.parametrize("kind", RUNNERS)
def test_tiers_open_side_by_side(tmp_path: Path, kind: str) -> None:
    specs = [
        misbehaving(kind, tmp_path / "diary", name=name, on_open="meet") for name in ("a", "b")
    ]
    with live(specs) as engine:
        assert [tier.is_open for tier in engine.manager.stats[1:]] == [1, 1]
