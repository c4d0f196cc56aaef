from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.runners import CHUNK_BYTES, KEYS, NOBODY, Make, Rig
from support.tier_process import HeldBackClock, children, is_there, pid_of

from kvtier_sdk import TierUnavailableError
from kvtier_sdk.metrics import metric_samples
from kvtier_sdk.runner.jobs import Job, Operation, ProcessStarted, RunnerStopped
from kvtier_sdk.runner.process import runner as process_runner
from kvtier_sdk.runner.process.child_process import ChildProcess


def kill(rig: Rig) -> None:
    os.kill(pid_of(rig.runner), signal.SIGKILL)


def test_a_killed_process_is_restarted(make_rig: Make, clock: HeldBackClock) -> None:
    rig = make_rig(on_load="hang").open()
    first = pid_of(rig.runner)
    rig.do(Operation.STORE, 0)
    rig.submit([rig.job(Operation.LOAD, 0, 1), rig.job(Operation.LOAD, 2)])
    rig.wait_past("hanging")
    kill(rig)
    rig.wait_for(3, others=1)
    died = rig.results[1:]
    assert [v.value for result in died for v in result.verdicts] == ["unavailable"] * 3
    assert all(result.released for result in died)
    assert {result.error for result in died} == {
        "held load: the tier's process died: signal 9 (killed, perhaps for want of memory)"
    }
    assert not is_there(first), "slots are free, so nobody may write to them any more"
    assert not rig.client.takes_reads
    assert not rig.client.takes_stores
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
    clock.go_on()
    rig.wait_for(4, others=2)
    assert [type(report) for report in rig.others] == [RunnerStopped, ProcessStarted]
    assert rig.client.takes_reads
    assert rig.client.takes_stores
    assert pid_of(rig.runner) != first
    seen = {sample.metric.name: sample.value for sample in metric_samples([rig.client.stats])}
    assert seen["kvtier_process_restarts_total"] == 1
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"], "this tier's chunks went with it"
    rig.pool.view(3)[:] = b"x" * CHUNK_BYTES
    assert rig.do(Operation.STORE, 3) == ["ok"]
    assert rig.do(Operation.LOOKUP, 3) == ["ok"]


def test_a_process_dies_with_jobs_unread(make_rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig().open()
    os.kill(pid_of(rig.runner), signal.SIGSTOP)
    rig.submit(rig.lookups(3))
    kill(rig)
    assert rig.wait_for(3) == ["unavailable"] * 3
    rig.close()
    told = caplog.messages
    death = "held: the tier's process died: signal 9 (killed, perhaps for want of memory)"
    assert told.count(death) == 1


def test_no_slot_is_free_while_the_process_lives(make_rig: Make) -> None:
    rig = make_rig(on_load="hang_up").open()
    child = pid_of(rig.runner)
    rig.submit([rig.job(Operation.LOAD, 0)])
    assert rig.wait_for(1) == ["unavailable"]
    assert not is_there(child)


def test_a_concluded_job_is_released_with_its_process(make_rig: Make) -> None:
    rig = make_rig(on_load="cling").open()
    job = rig.job(Operation.LOAD, 0)
    job.deadline_s = rig.clock.now_s() + 1.0
    rig.submit([job])
    rig.wait_past("hanging")
    assert rig.wait_for(1) == ["timeout"]
    assert not rig.results[0].released
    kill(rig)
    assert rig.client.jobs.unreleased == 1
    rig.wait_for(1, others=1)
    assert rig.client.jobs.unreleased == 0


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("crash", "signal 11; it printed 'Fatal Python error: Segmentation fault'"),
        ("leave_a_copy", "exit status 7"),
    ],
)
def test_a_cause_of_death_is_logged(
    make_rig: Make, caplog: pytest.LogCaptureFixture, trouble: str, reason: str
) -> None:
    rig = make_rig(on_lookup=trouble).open()
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
    assert rig.results[0].error == f"held lookup: the tier's process died: {reason}"
    assert f"the tier's process died: {reason}" in caplog.text


@pytest.mark.parametrize("trouble", ["on_init", "on_open"])
def test_an_abort_at_the_start_is_said_with_what_was_printed(
    make_rig: Make, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    rig = make_rig(**{trouble: "abort"}, secret_key="hunter2hunter2")
    with pytest.raises(TierUnavailableError) as told:
        rig.client.open()
    panic = "panicked at client.rs:7: redis://u:***@h is no URL of ***"
    assert str(told.value) == (
        f"held open: the tier's process died: signal 6; it printed '{panic}; "
        "Fatal Python error: Aborted'"
    )
    assert f"held: stderr: {panic}\n" in caplog.text
    assert "hunter2" not in caplog.text


def test_a_process_that_lived_long_restarts_soon(make_rig: Make, clock: HeldBackClock) -> None:
    rig = make_rig().open()
    for restarts, lived_s in enumerate((0.0, 0.0, 30.0), start=1):
        clock.ahead_s += lived_s
        kill(rig)
        clock.go_on()
        rig.wait_until(lambda restarts=restarts: rig.client.stats.restarts == restarts)
    assert clock.pauses_s == [1.0, 2.0, 1.0]


def test_a_process_that_does_not_come_back_is_tried_again_later_and_later(
    make_rig: Make, clock: HeldBackClock, tmp_path: Path
) -> None:
    rig = make_rig(on_open="refuse_again").open()
    kill(rig)
    for _ in range(3):
        clock.go_on()
    assert clock.paused.wait(30)
    assert clock.pauses_s == [1.0, 2.0, 4.0, 8.0]
    rig.wait_for(0, others=1)
    assert not rig.client.takes_reads
    # Closing does not wait for the pause before the next start.
    rig.client.close(5.0)


def test_a_process_that_hangs_when_it_is_restarted_is_given_up(
    make_rig: Make,
    clock: HeldBackClock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = make_rig(on_open="hang_again").open()
    brief = rig.client.spec.runner.model_copy(update={"open_deadline_s": 0.01})
    spec = replace(rig.client.spec, runner=brief)
    monkeypatch.setattr(rig.runner, "_spec", spec)
    monkeypatch.setattr(process_runner, "_START_S", 0.0)
    kill(rig)
    for _ in range(2):
        clock.go_on()
    assert clock.paused.wait(30)
    assert clock.pauses_s == [1.0, 2.0, 4.0]
    assert "could not be started: held open: it did not open within 0.01 s" in caplog.text
    assert children() == []


def test_the_engine_does_not_wait_for_a_stopped_process(make_rig: Make) -> None:
    rig = make_rig().open()
    child = pid_of(rig.runner)
    os.kill(child, signal.SIGSTOP)
    # The socket and the engine's buffer cannot hold forty jobs of this size.
    keys = [bytes(36)] * 20_000
    deadline_s = rig.clock.now_s() + 60
    for number in range(10**6, 10**6 + 40):
        rig.submit([Job(number, Operation.LOOKUP, keys, (), NOBODY, deadline_s)])
        rig.take()
    rig.client.close(0.2)
    assert not is_there(child)
    verdicts = set(rig.take())
    assert verdicts <= {"cancelled", "unavailable"}


def test_a_result_that_does_not_fit_fails(make_rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig(on_load="hang").open()
    job = rig.job(Operation.LOAD, 0, 1)
    rig.submit([job])
    # The process received only two keys, so its result has two verdicts for three keys.
    job.keys = [*job.keys, KEYS[2]]
    rig.client.drain(0.01)
    assert rig.wait_for(1) == ["failed"]
    assert len(rig.results[0].verdicts) == 3
    assert "a result that does not fit its job" in caplog.text


def test_the_end_of_a_dead_process_is_not_charged_to_the_next_one(
    make_rig: Make, clock: HeldBackClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process may already run when an idle engine notices that the old socket is closed."""
    suspected: list[int | None] = []
    monkeypatch.setattr(ChildProcess, "lost", lambda child, error: suspected.append(child.pid))
    rig = make_rig().open()
    first = pid_of(rig.runner)
    os.kill(first, signal.SIGKILL)
    clock.go_on()
    for _ in range(6000):
        changes = rig.runner._changes  # type: ignore[attr-defined]
        if changes and isinstance(changes[-1][1], ProcessStarted):
            break
        threading.Event().wait(0.005)
    second = pid_of(rig.runner)
    assert second != first
    rig.take()
    rig.runner._call(asyncio.sleep(0.05), 30.0, None)  # type: ignore[attr-defined]
    assert second not in suspected
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]


def test_a_death_at_the_start_stops_no_engine(make_rig: Make, clock: HeldBackClock) -> None:
    rig = make_rig(on_open="leave_once", runner={"required": False}).open()
    assert not rig.client.takes_reads
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
    clock.go_on()
    rig.wait_open()
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]
    stats = rig.client.stats
    assert (stats.open_failures, stats.restarts) == (1, 0)
    assert stats.errors[-1] == "held open: the tier's process died: exit status 7"


def test_a_process_restarts_while_its_store_is_down(make_rig: Make, clock: HeldBackClock) -> None:
    rig = make_rig(
        on_open="refuse_again", runner={"required": False, "probe_interval": 0.01}
    ).open()
    kill(rig)
    clock.go_on()
    rig.wait_until(lambda: rig.client.stats.open_failures > 1)
    assert rig.client.stats.restarts == 1
    assert rig.client.stats.is_open == 0
    assert not rig.client.takes_stores
    assert rig.do(Operation.LOOKUP, 0) == ["unavailable"]
