from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runners import CHUNK_BYTES, KEYS, NOBODY, Make, Rig, rig_maker

from kvtier_sdk import SystemClock
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.runner.jobs import ChunksRemoved, OpeningEnded, Operation


class CountedLoop(asyncio.SelectorEventLoop):
    """A loop that counts wake-ups from other threads, and fails on request."""

    wakes = 0
    breaks_down = False

    def call_soon_threadsafe(self, *args: Any, **kwargs: Any) -> asyncio.Handle:
        self.wakes += 1
        return super().call_soon_threadsafe(*args, **kwargs)

    def _run_once(self) -> None:
        if self.breaks_down:
            self.breaks_down = False
            raise OSError("select: bad file descriptor")
        super()._run_once()  # type: ignore[misc]


class CountingClock(SystemClock):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        self.loop = CountedLoop()
        return self.loop


@pytest.fixture
def clock() -> CountingClock:
    return CountingClock()


@pytest.fixture
def make_rig(tmp_path: Path, clock: CountingClock) -> Iterator[Make]:
    with rig_maker("thread", tmp_path, clock=clock) as make:
        yield make


def runner_of(rig: Rig) -> ThreadRunner:
    assert isinstance(rig.runner, ThreadRunner)
    return rig.runner


def test_a_burst_of_hand_overs_wakes_the_loop_once(make_rig: Make, clock: CountingClock) -> None:
    rig = make_rig(on_lookup="block").open()
    rig.submit(rig.lookups(1))
    rig.wait_past("blocking")
    before = clock.loop.wakes
    for _ in range(10):
        rig.submit(rig.lookups(3))
    assert clock.loop.wakes == before + 1
    rig.unblock()
    assert rig.wait_for(31) == ["not_found"] * 31
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]


def test_the_reports_of_one_turn_of_the_loop_notify_once(make_rig: Make) -> None:
    rig = make_rig().open()
    notifications = []

    def notify() -> None:
        notifications.append(len(rig.runner.peek()))
        rig.notified.set()

    runner_of(rig)._notify = notify
    rig.submit(rig.lookups(20))
    rig.wait_for(20)
    assert max(notifications) >= 20
    assert len(notifications) < 5, "metrics may notify too"


def test_an_opening_that_the_engine_does_not_wait_for_notifies_when_it_ends(make_rig: Make) -> None:
    rig = make_rig(engine_waits=False).open()
    rig.wait_for(0, others=1)
    assert isinstance(rig.others[0], OpeningEnded)


def test_a_report_of_another_thread_notifies_too(make_rig: Make) -> None:
    rig = make_rig().open()
    runner_of(rig)._tier_loop.call.tier.context.report_removed([b"a"])
    rig.wait_for(0, others=1)
    assert isinstance(rig.others[0], ChunksRemoved)


def test_a_failing_notify_stops_nothing(make_rig: Make, caplog: pytest.LogCaptureFixture) -> None:
    rig = make_rig().open()

    def broken() -> None:
        rig.notified.set()
        raise RuntimeError("the engine is gone")

    runner_of(rig)._notify = broken
    for _ in range(2):
        assert rig.do(Operation.LOOKUP, 0) == ["not_found"]
    assert "notifying the engine failed" in caplog.text


def test_a_loop_that_breaks_down_concludes_its_jobs_and_says_so(
    make_rig: Make, clock: CountingClock, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_lookup="hang").open()
    rig.submit(rig.lookups(5))
    rig.wait_past("hanging")
    clock.loop.breaks_down = True
    rig.submit(rig.lookups(1))
    assert rig.wait_for(6) == ["cancelled"] * 6
    rig.join()
    rig.submit(rig.lookups(1))
    assert rig.take() == ["cancelled"] * 7
    assert "the tier's loop has ended" in caplog.text


def test_a_thread_that_is_stuck_ends_when_it_can(make_rig: Make) -> None:
    rig = make_rig(on_lookup="block").open()
    rig.submit(rig.lookups(1))
    rig.wait_past("blocking")
    rig.client.close(0.01)
    rig.unblock()
    rig.join()
    assert rig.past()[-1] == "closed"


@pytest.mark.parametrize(("first", "second"), [(4, 1), (2, 2)])
def test_a_whole_load_is_taken_or_refused_as_one(make_rig: Make, first: int, second: int) -> None:
    rig = make_rig(on_load="hang", runner={"max_queue": 3 * CHUNK_BYTES}).open()
    load = rig.client.load
    assert load(KEYS[:first], range(first), NOBODY, whole=True), "an empty queue takes any number"
    assert load(KEYS[4 : 4 + second], range(4, 4 + second), NOBODY, whole=True) is None
    assert rig.client.stats.dropped == {"load.queue_full": second}
    rig.client.flush()
    rig.client.drain(0.01)
