"""The thread runner: wake-ups, and loops that break down. Real threads, no timing.

The promises of every runner are tested in test_transports.py.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvtier_sdk import (
    Capability,
    HostPool,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    OffloadKey,
    RequestContext,
    RunnerOptions,
    SystemClock,
    TierSpec,
)
from kvtier_sdk.runner import ThreadRunner
from kvtier_sdk.runner.jobs import (
    ChunksRemoved,
    Job,
    JobResult,
    OpeningEnded,
    Operation,
    Report,
)

NOBODY = RequestContext("nobody")


class CountedLoop(asyncio.SelectorEventLoop):
    """A loop that counts its wake-ups by other threads, and can be made to break down."""

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
    """A clock that makes one loop, and keeps it."""

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        self.loop = CountedLoop()
        return self.loop


class HeldTier(MemoryTier):
    """A memory tier whose thread can be held in mid-call, and that reports nothing by itself."""

    capabilities = MemoryTier.capabilities & ~Capability.USAGE

    def __init__(self, config: MemoryTierConfig, context: Any) -> None:
        super().__init__(config, context)
        self.on_lookup: Callable[[], Any] | None = None

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        if self.on_lookup is not None:
            trouble, self.on_lookup = self.on_lookup, None
            trouble()
        return await super().lookup(keys, request)


class Rig:
    """A thread runner, and an engine that waits for its notifications."""

    def __init__(self, *, engine_waits: bool = True) -> None:
        self.pool = HostPool(2, 64)
        self.clock = CountingClock()
        self.notified = threading.Event()
        self.notifications = 0
        self.results: list[JobResult] = []
        self.others: list[Report] = []
        self._ids = itertools.count()
        spec = TierSpec(
            "held", "memory", HeldTier, MemoryTierConfig(), RunnerOptions(lookup_deadline=60)
        )
        spec = spec if engine_waits else spec.in_background()
        self.runner = ThreadRunner(
            spec, namespace=Namespace({}), pool=self.pool, clock=self.clock, notify=self.notify
        )
        tier = self.runner._tier_loop._tier
        assert isinstance(tier, HeldTier)
        self.tier = tier

    def notify(self) -> None:
        self.notifications += 1
        self.notified.set()

    def jobs(self, count: int) -> list[Job]:
        deadline_s = self.clock.now_s() + 60
        return [
            Job(next(self._ids), Operation.LOOKUP, [b"a", b"b"], (), NOBODY, deadline_s)
            for _ in range(count)
        ]

    def submit(self, jobs: list[Job]) -> None:
        self.results += self.runner.submit(jobs)

    def take(self) -> list[str]:
        """Poll once, and return the verdicts of all results so far."""
        for report in self.runner.poll():
            (self.results if isinstance(report, JobResult) else self.others).append(report)  # type: ignore[attr-defined]
        return [result.verdicts[0].value for result in self.results]

    def wait_for(self, count: int) -> list[str]:
        """Poll at each notification until a number of results have come."""
        while len(verdicts := self.take()) < count:
            assert self.notified.wait(30), f"{len(verdicts)} results, and no notification"
            self.notified.clear()
        return verdicts

    def wait_for_notifications(self, count: int) -> None:
        """Wait for a number of notifications since the start, and assert that no more come."""
        for _ in range(6000):
            if self.notifications >= count:
                break
            threading.Event().wait(0.005)
        assert self.notifications == count

    def hold(self) -> threading.Event:
        """Stop the tier's thread in mid-call until the event is set; this takes one job."""
        entered, release = threading.Event(), threading.Event()

        def stop() -> None:
            entered.set()
            release.wait(30)

        self.tier.on_lookup = stop
        self.submit(self.jobs(1))
        assert entered.wait(30)
        return release


def end_of_thread(rig: Rig) -> None:
    thread = rig.runner._thread
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.runner.close(5.0)
    rig.pool.close()


def test_a_burst_of_hand_overs_wakes_the_loop_once(rig: Rig) -> None:
    rig.runner.start()
    release = rig.hold()
    before = rig.clock.loop.wakes
    for _ in range(10):
        rig.submit(rig.jobs(3))
    assert rig.clock.loop.wakes == before + 1
    release.set()
    assert rig.wait_for(31) == ["not_found"] * 31
    rig.submit(rig.jobs(1))
    assert rig.wait_for(32)


def test_the_reports_of_one_turn_of_the_loop_notify_once(rig: Rig) -> None:
    rig.runner.start()
    rig.submit(rig.jobs(20))
    rig.wait_for(20)
    rig.wait_for_notifications(1)
    rig.notified.clear()
    rig.submit(rig.jobs(20))
    rig.wait_for(40)
    rig.wait_for_notifications(2)


def test_an_opening_that_the_engine_does_not_wait_for_notifies_when_it_ends() -> None:
    rig = Rig(engine_waits=False)
    try:
        assert not rig.runner.start()
        while not any(isinstance(report, OpeningEnded) for report in rig.others):
            assert rig.notified.wait(30), "the tier is open, and the engine does not know"
            rig.notified.clear()
            rig.take()
    finally:
        rig.runner.close(5.0)
        rig.pool.close()


def test_a_report_of_another_thread_notifies_too(rig: Rig) -> None:
    rig.runner.start()
    rig.tier.context.report_removed([b"a"])
    assert rig.notified.wait(30)
    rig.take()
    (report,) = rig.others
    assert isinstance(report, ChunksRemoved)


def test_a_notification_that_raises_stops_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.runner.start()
    notify = rig.runner._notify

    def broken() -> None:
        rig.runner._notify = notify
        rig.notified.set()
        raise RuntimeError("the engine is gone")

    rig.runner._notify = broken
    rig.submit(rig.jobs(1))
    rig.wait_for(1)
    rig.submit(rig.jobs(1))
    rig.wait_for(2)
    assert "notifying the engine failed" in caplog.text


def test_a_loop_that_breaks_down_concludes_its_jobs_and_says_so(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.runner.start()

    def break_down() -> None:
        rig.clock.loop.breaks_down = True

    rig.tier.on_lookup = break_down
    rig.submit(rig.jobs(5))
    assert len(rig.wait_for(5)) == 5
    end_of_thread(rig)
    rig.submit(rig.jobs(1))
    assert rig.take()[-1] == "cancelled"
    assert "the tier's loop has ended" in caplog.text


def test_a_thread_that_is_stuck_ends_when_it_can(rig: Rig) -> None:
    rig.runner.start()
    release = rig.hold()
    rig.runner.close(0.01)
    rig.submit(rig.jobs(2))
    assert rig.take() == ["cancelled"] * 2
    release.set()
    end_of_thread(rig)
    assert len(rig.take()) == 3, "what was under way has ended in its way"
