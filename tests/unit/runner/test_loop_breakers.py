from __future__ import annotations

import pytest
from support.scripted_loop import LOAD, LOOKUP, MOVES, STORE, TOUCH, Act, Make, failing

from kvtier_sdk import RequestContext, make_offload_key
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import Operation


def test_an_open_breaker_refuses_at_once_and_without_a_call(make: Make) -> None:
    rig = make(retries=0)
    failing(rig, "lookup")
    states = rig.account.breakers[Direction.READ], rig.account.breakers[Direction.WRITE]
    assert states == (BreakerState.OPEN, BreakerState.CLOSED)
    calls = len(rig.tier.calls)
    for operation in (LOOKUP, LOAD, TOUCH):
        job = rig.job(operation)
        rig.submit(job)  # must be refused at once, because the loop does not run again
        assert rig.account.verdicts(job.job_id) == ["unavailable"]
    assert len(rig.tier.calls) == calls
    assert rig.do(STORE) == ["ok"]


def test_an_interruption_is_not_the_tiers(make: Make) -> None:
    rig = make(Act("interrupted"))
    lookup = rig.loop.call.lookup([make_offload_key(b"k")], RequestContext("r"))
    with pytest.raises(KeyboardInterrupt):
        lookup.send(None)


def test_opening_concludes_what_waits_in_its_direction_and_nothing_else(make: Make) -> None:
    rig = make(retries=0, concurrency=1, breaker_failures=1)
    rig.tier.script = iter([Act("unavailable", after_s=0.5)])
    rig.tier.always["load"] = Act(after_s=1.0)
    jobs = [rig.job(STORE), rig.job(STORE, 3), rig.job(STORE)]
    rig.submit(*jobs)
    rig.run_for(0.1)
    load = rig.ask(LOAD)
    rig.run_for(0.45)
    assert [rig.account.verdicts(job.job_id) for job in jobs] == [
        ["unavailable"],
        ["unavailable"] * 3,
        ["unavailable"],
    ]
    assert len(rig.tier.calls) == 2
    rig.run_for(2.0)
    assert rig.account.verdicts(load.job_id) == ["not_found"]


def test_each_retry_is_a_call_and_none_is_made_once_the_breaker_is_open(make: Make) -> None:
    rig = make(retries=10, breaker_failures=3)
    rig.tier.always["load"] = Act("unavailable")
    job = rig.ask(LOAD, run_s=4.0)
    assert len(rig.tier.calls) == 3
    assert rig.account.verdicts(job.job_id) == ["unavailable"]
    assert rig.account.results[job.job_id].retries == 2
    assert rig.account.results[job.job_id].duration_s < 1.0


def test_transfers_that_hang_open_it_at_their_deadline(make: Make) -> None:
    rig = make(breaker_failures=2)
    rig.tier.always["store"] = Act(after_s=60.0, stubborn=True)
    for _ in range(2):
        rig.ask(STORE, within_s=2.0)
    rig.run_for(1.9)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.CLOSED
    rig.run_for(0.2)
    assert rig.account.breakers[Direction.WRITE] is BreakerState.OPEN


def test_lookups_that_are_late_are_weaker_evidence(make: Make) -> None:
    rig = make()
    rig.tier.always["lookup"] = Act(after_s=0.2)
    for count in range(1, 11):
        rig.ask(LOOKUP, within_s=0.05, run_s=0.06)
        late_enough = count == 10
        assert (rig.account.breakers[Direction.READ] is BreakerState.OPEN) is late_enough


def test_a_deadline_that_the_queue_used_up_says_nothing_of_the_tier(make: Make) -> None:
    rig = make(concurrency=1, breaker_failures=1)
    rig.tier.always["load"] = Act(after_s=2.0)
    for _ in range(4):
        # The first load ends in time. The second begins with 0.5 s left. The others never begin.
        rig.ask(LOAD, within_s=2.5)
    rig.run_for(2.6)
    verdicts = [rig.account.verdicts(job_id) for job_id in range(4)]
    assert verdicts == [["not_found"], ["timeout"], ["timeout"], ["timeout"]]
    assert rig.account.moves == []


@pytest.mark.parametrize("operation", MOVES)
@pytest.mark.parametrize("breaker_failures", [2, 1000])
def test_calls_that_hang_in_every_place_keep_their_direction_refused(
    make: Make, operation: Operation, breaker_failures: int
) -> None:
    """A probe skips the queue, so its success must not close the breaker while requests wait."""
    # Stores may use three of the four concurrent calls.
    hung = 3 if operation is STORE else 4
    hangs = Act(after_s=200.0, stubborn=True)
    rig = make(*[hangs] * hung, concurrency=4, breaker_failures=breaker_failures)
    direction = Direction.WRITE if operation is STORE else Direction.READ
    for _ in range(hung):
        rig.ask(operation, within_s=2.0)
    rig.run_for(2.1)
    # Even with a closed breaker, requests wait only until their deadlines.
    waiting = [rig.ask(operation, within_s=2.0) for _ in range(3)]
    for _ in range(25):
        # Each successful lookup resets the count of failures in a row.
        rig.ask(LOOKUP, run_s=0.1)
    assert {job.job_id for job in waiting} <= rig.account.results.keys()
    for _ in range(10):
        assert rig.account.breakers[direction] is not BreakerState.CLOSED
        refused = rig.ask(operation, run_s=0.0)
        assert rig.account.verdicts(refused.job_id) == ["unavailable"]
        rig.run_for(10.0)
    assert not any(rig.loop._queues.values())
    # A probe can close the breaker only after the hanging calls have ended.
    rig.tier.let_go.set()
    rig.run_for(35.0)
    assert rig.account.breakers[direction] is BreakerState.CLOSED
    served = "ok" if operation is STORE else "not_found"
    assert rig.do(operation) == [served]


def test_a_call_that_hangs_takes_its_own_place_only(make: Make) -> None:
    rig = make(Act(after_s=200.0, stubborn=True), concurrency=2, breaker_failures=1)
    rig.ask(LOAD, within_s=2.0)
    rig.run_for(10.0)
    assert rig.account.breakers[Direction.READ] is BreakerState.CLOSED
    assert rig.do(LOAD) == ["not_found"]


def test_what_expires_in_the_queue_leaves_it(make: Make) -> None:
    rig = make(Act(after_s=20.0), concurrency=1)
    rig.ask(LOAD, within_s=30.0)
    for _ in range(10):
        rig.ask(LOAD, within_s=1.0)
    rig.run_for(1.1)
    assert not any(rig.loop._queues.values())
    assert rig.account.moves == [], "the first call is in time: the tier is well, and busy"
