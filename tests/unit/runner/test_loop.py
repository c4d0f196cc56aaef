from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from support.scripted_loop import ERRORS, Act, Rig

from kvtier_sdk.runner.breaker import BreakerState
from kvtier_sdk.runner.jobs import Operation

KINDS = ["fine", "mixed", "bug", "exit", "panic", "cancels itself", "raises cancelled", *ERRORS]
ACTS = st.builds(
    Act, st.sampled_from(KINDS), st.sampled_from([0.0, 0.0, 0.01, 0.3, 4.0, 40.0]), st.booleans()
)
BREACHES = st.builds(Act, st.sampled_from(["too few", "nonsense"]))
JOBS = st.tuples(
    st.sampled_from(Operation), st.integers(0, 9), st.sampled_from([-1.0, 0.0, 0.05, 2.0, 30.0])
)
STEPS = st.one_of(
    st.tuples(st.just("submit"), st.lists(JOBS, min_size=1, max_size=5)),
    st.tuples(st.just("run"), st.sampled_from([0.0, 0.001, 0.02, 0.5, 6.0])),
    st.tuples(st.just("drain"), st.sampled_from([0.0, 0.1, 10.0])),
    st.tuples(st.just("cancel"), st.integers(0, 5)),
    st.tuples(st.just("close"), st.none()),
)


@given(
    script=st.lists(st.one_of(ACTS, ACTS, ACTS, ACTS, BREACHES), max_size=25),
    steps=st.lists(STEPS, max_size=15),
    concurrency=st.integers(1, 4),
)
@example(
    script=[Act("unavailable")] * 25,
    steps=[("submit", [(Operation.LOAD, 9, 30.0), (Operation.STORE, 9, 30.0)]), ("run", 6.0)],
    concurrency=2,
)
def test_each_job_ends_once_and_nothing_is_left(
    script: list[Act], steps: list[tuple[str, Any]], concurrency: int
) -> None:
    rig = Rig(*script, concurrency=concurrency, max_batch="200B", max_queue="1MiB")
    closed = False
    for step, argument in steps:
        if step == "submit":
            rig.submit(*[rig.job(*job) for job in argument])
        elif step == "run":
            rig.run_for(argument)
        elif step == "drain":
            rig.run(rig.loop.drain(argument))
        elif step == "cancel":
            # Cancel one of the loop's tasks, as code outside the SDK can.
            tasks = sorted(asyncio.all_tasks(rig.event_loop), key=lambda task: task.get_name())
            for task in tasks[argument : argument + 1]:
                if task.get_name().endswith(" job"):
                    task.cancel()
        elif not closed:
            closed = True
            rig.run(rig.loop.close())
    rig.tier.let_go.set()
    rig.tier.script = iter(())
    rig.run_for(100.0)
    assert rig.account.breaches == []
    assert rig.account.results.keys() == rig.account.jobs.keys() == rig.account.released
    if not closed and rig.loop.call.quarantine is None:
        assert set(rig.account.breakers.values()) == {BreakerState.CLOSED}
    last = rig.job(Operation.LOOKUP)
    if not closed:
        rig.run(rig.loop.close())
    rig.submit(last)
    assert rig.account.verdicts(last.job_id) == ["cancelled"]
    rig.run_for(1.0)
    assert not asyncio.all_tasks(rig.event_loop)
    rig.event_loop.close()
    assert rig.tier.closed
