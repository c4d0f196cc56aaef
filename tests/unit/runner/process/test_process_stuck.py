from __future__ import annotations

import time

import pytest
from support.runners import Make, Rig
from support.tier_process import HeldBackClock, LookClock, is_there, pid_of

from kvtier_sdk.runner.jobs import Job, Operation, ProcessStarted


def late_job(rig: Rig, operation: Operation, *chunks: int) -> Job:
    """Create a job that expires in 600 s, or earlier if a test sets the engine's clock ahead."""
    job = rig.job(operation, *chunks)
    job.deadline_s = time.monotonic() + 600
    return job


def test_a_stuck_process_is_killed(make_rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    clock = LookClock()
    rig = make_rig(on_load="block", clock=clock).open()
    child = pid_of(rig.runner)
    rig.submit([late_job(rig, Operation.LOAD, 0), late_job(rig, Operation.STORE, 1)])
    rig.wait_past("blocking")
    assert rig.take() == []
    clock.ahead_s = 1000.0
    assert rig.take() == ["timeout"] * 2
    assert rig.client.jobs.unreleased == 2, "the tier may still touch their slots"
    for _ in range(9):
        clock.look()
    assert is_there(child)
    clock.look()
    rig.wait_for(2, others=1)
    assert not is_there(child)
    assert rig.client.jobs.unreleased == 0
    assert clock.paused.wait(30)
    assert "the tier's process died: it was stuck, and was killed" in caplog.text
    clock.go_on()
    rig.wait_for(2, others=2)
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]


def test_a_process_that_answers_a_ping_is_not_stuck(make_rig: Make) -> None:
    clock = LookClock()
    rig = make_rig(on_load="hang", clock=clock).open()
    child = pid_of(rig.runner)
    rig.submit([late_job(rig, Operation.LOAD, 0)])
    clock.ahead_s = 1000.0
    assert rig.take() == ["timeout"]
    clock.ahead_s = 0.0
    for _ in range(30):
        rig.do(Operation.LOOKUP, 0)
    clock.look()
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]
    assert clock.looks == 0, "nothing pings it any longer"
    assert pid_of(rig.runner) == child


def test_a_process_with_calls_that_never_end_is_killed_and_restarted(
    make_rig: Make, clock: HeldBackClock, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"concurrency": 2, "breaker_failures": 2, "probe_interval": "10ms"}
    rig = make_rig(on_open="lose_patience", on_load="cling", runner=options).open()
    child = pid_of(rig.runner)
    jobs = [rig.job(Operation.LOAD, chunk) for chunk in range(2)]
    for job in jobs:
        job.deadline_s = rig.clock.now_s() + 1.0
    rig.submit(jobs)
    assert rig.wait_for(2) == ["timeout"] * 2
    assert rig.client.jobs.unreleased == 2
    assert clock.paused.wait(30)
    assert not is_there(child)
    rig.take()
    assert rig.client.jobs.unreleased == 0, "their slots are free"
    told = caplog.messages
    assert told[-2:] == [
        "held: reads stay refused: calls that hang leave no room for another, and nothing but the "
        "end of the process ends them",
        "held: the tier's process died: calls hung, and it was killed",
    ]
    clock.go_on()
    while not any(isinstance(report, ProcessStarted) for report in rig.others):
        rig.wait_for(2, others=len(rig.others) + 1)
    rig.take()
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]
