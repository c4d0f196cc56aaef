from __future__ import annotations

import asyncio

import pytest

from kvtier_sdk import RunningCalls, TierUnavailableError


async def test_close_waits_for_the_calls_in_flight_and_refuses_new_ones():
    calls = RunningCalls()
    ended = asyncio.Event()
    done: list[str] = []

    async def call() -> None:
        async with calls:
            await ended.wait()
            done.append("call")

    running = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(calls.close())
    await asyncio.sleep(0)
    with pytest.raises(TierUnavailableError, match="the tier was closed"):
        await call()
    assert not closing.done()
    ended.set()
    await closing
    assert done == ["call"] * 3
    await asyncio.gather(*running)
    for unused in (calls, RunningCalls()):
        await unused.close()


async def test_a_call_that_fails_or_is_cancelled_holds_up_nothing():
    calls = RunningCalls()
    with pytest.raises(ZeroDivisionError):
        async with calls:
            raise ZeroDivisionError

    async def call() -> None:
        async with calls:
            await asyncio.Event().wait()

    hangs = asyncio.create_task(call())
    await asyncio.sleep(0)
    closing = asyncio.create_task(calls.close())
    await asyncio.sleep(0)
    assert not closing.done()
    hangs.cancel()
    await closing
