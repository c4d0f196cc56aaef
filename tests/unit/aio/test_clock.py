from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop
from support.peer import settle

from kvtier_sdk import SystemClock
from kvtier_sdk.aio.clock import wait_out

CLOCK = SystemClock()
#: A task that runs longer than this counts as hung.
PATIENCE_S = 30.0


class Calls:
    def __init__(self) -> None:
        self.gates: dict[int, asyncio.Event] = {}
        self.started: list[int] = []
        self.ended: list[int] = []

    @property
    def running(self) -> set[int]:
        return set(self.started) - set(self.ended)

    def make(self, count: int) -> list[Callable[[], Awaitable[str]]]:
        for number in range(count):
            self.gates[number] = asyncio.Event()
        return [lambda number=number: self._call(number) for number in range(count)]

    async def _call(self, number: int) -> str:
        self.started.append(number)
        try:
            await self.gates[number].wait()
        finally:
            await asyncio.sleep(0)
            self.ended.append(number)
        return f"result {number}"


def spawn(calls: list[Callable[[], Awaitable[Any]]], limit: int) -> asyncio.Task[list[Any]]:
    return CLOCK.spawn(CLOCK.gather_bounded(calls, limit=limit), name="gather")


async def test_results_have_the_order_of_the_calls() -> None:
    calls = Calls()
    task = spawn(calls.make(4), limit=4)
    for number in (2, 0, 3, 1):
        calls.gates[number].set()
        await settle()
    assert await task == ["result 0", "result 1", "result 2", "result 3"]
    assert calls.ended == [2, 0, 3, 1]


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_than_the_limit_run_at_once(limit: int) -> None:
    calls = Calls()
    task = spawn(calls.make(7), limit=limit)
    for number in range(7):
        await settle()
        assert calls.running == set(range(number, min(number + limit, 7)))
        calls.gates[number].set()
    await task
    assert calls.started == list(range(7))


async def test_an_error_cancels_the_others_and_waits_for_them() -> None:
    calls = Calls()

    async def fail() -> str:
        await asyncio.sleep(0)
        raise ZeroDivisionError

    task = spawn([*calls.make(2), fail, *calls.make(5)[2:]], limit=3)
    with pytest.raises(ZeroDivisionError):
        await task
    assert calls.running == set()
    assert calls.started == [0, 1]


async def test_the_first_error_is_the_one_that_is_raised() -> None:
    async def fail_at_once() -> None:
        raise ZeroDivisionError

    async def fail_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError

    with pytest.raises(ZeroDivisionError):
        await CLOCK.gather_bounded([fail_when_cancelled, fail_at_once], limit=2)


async def test_a_cancellation_cancels_all_and_waits_for_them() -> None:
    calls = Calls()
    task = spawn(calls.make(5), limit=2)
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert calls.started == [0, 1]
    assert calls.ended == [0, 1]


async def test_a_second_cancellation_does_not_leave_one_running() -> None:
    released = asyncio.Event()
    ended = []

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                await wait_out([CLOCK.spawn(released.wait(), name="clean-up")])
            finally:
                ended.append(True)

    task = spawn([stubborn], limit=1)
    await settle()
    for _ in range(3):
        task.cancel()
        await settle()
    assert not task.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


@pytest.mark.parametrize("outcome", ["a result", "an error"])
async def test_a_call_that_swallows_its_cancellation_is_followed_by_no_other(outcome: str) -> None:
    started = []

    async def swallow(number: int) -> None:
        started.append(number)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if outcome == "an error":
                raise ZeroDivisionError from None

    task = spawn([lambda number=number: swallow(number) for number in range(4)], limit=2)
    await settle()
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled() is (outcome == "a result")
    assert started == [0, 1]


async def test_waiting_out_leaves_the_outcomes_to_their_owner() -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    task = CLOCK.spawn(fail(), name="fails")
    await wait_out([task])
    assert isinstance(task.exception(), ZeroDivisionError)


async def test_a_cancelled_wait_still_waits() -> None:
    released = asyncio.Event()
    task = CLOCK.spawn(released.wait(), name="slow")
    waiter = CLOCK.spawn(wait_out([task]), name="waiter")
    await settle()
    waiter.cancel()
    await settle()
    assert not waiter.done()
    assert not task.cancelled()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert task.result() is True


async def test_a_callback_is_called_with_its_arguments_unless_taken_back() -> None:
    called: list[str] = []
    done = asyncio.Event()
    taken_back = CLOCK.call_at(CLOCK.now_s(), called.append, "taken back")
    CLOCK.call_at(CLOCK.now_s() - 100, called.append, "in the past")
    CLOCK.call_at(CLOCK.now_s(), done.set)
    taken_back.cancel()
    await done.wait()
    assert called == ["in the past"]


@pytest.mark.parametrize("installed", [True, False])
def test_a_new_loop_is_uvloops_if_it_can(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = CLOCK.new_event_loop()
    assert isinstance(loop, uvloop.Loop) is installed
    loop.close()
