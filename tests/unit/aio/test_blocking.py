from __future__ import annotations

import asyncio
import contextlib
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from kvtier_sdk import run_blocking
from kvtier_sdk.aio.blocking import THREAD_LIMIT, close_blocking_threads

# A wait takes this long only if a test fails.
PATIENCE_S = 30.0


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Yield an event that ends the blocking calls."""
    event = threading.Event()
    yield event
    event.set()


class Buffer:
    pass


def run(code: str) -> str:
    command = [sys.executable, "-P", "-c", code]
    return subprocess.check_output(command, text=True, timeout=PATIENCE_S)


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0.001)


async def test_a_call_gets_its_arguments_and_gives_its_result() -> None:
    assert await run_blocking(sorted, [1, 3, 2], reverse=True) == [3, 2, 1]


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), asyncio.CancelledError("x")])
async def test_an_exception_is_raised_here_and_ends_no_thread(error: BaseException) -> None:
    def fail() -> None:
        raise error

    for _ in range(2 * THREAD_LIMIT):
        with pytest.raises(type(error)):
            await run_blocking(fail)
    assert await run_blocking(lambda: "alive") == "alive"


def test_even_a_stop_iteration_comes_back() -> None:
    # A future cannot carry StopIteration. Run the call in a new process: if the test failed, the
    # coroutine would wait for ever, and could not be cancelled.
    code = """
import asyncio
import contextlib
from kvtier_sdk import run_blocking

try:
    asyncio.run(run_blocking(next, iter(())))
except RuntimeError as error:
    print(error, repr(error.__cause__))
"""
    assert run(code) == "coroutine raised StopIteration StopIteration()\n"


@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_that_has_returned_holds_no_arguments(fails: bool) -> None:
    def use(buffer: Buffer) -> None:
        if fails:
            raise OSError

    for _ in range(20):
        buffer = Buffer()
        seen = weakref.ref(buffer)
        with contextlib.suppress(OSError):
            await run_blocking(use, buffer)
        del buffer
        assert seen() is None


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_call_outlasts_its_function(
    released: threading.Event, fails: bool
) -> None:
    started, ended = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        released.wait(PATIENCE_S)
        ended.set()
        if fails:
            raise ZeroDivisionError

    task = asyncio.create_task(run_blocking(work))
    await until(started)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert not task.done()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


@pytest.fixture
async def occupied(released: threading.Event) -> AsyncIterator[None]:
    started = threading.Semaphore(0)

    def work() -> bool:
        started.release()
        return released.wait(PATIENCE_S)

    tasks = [asyncio.create_task(run_blocking(work)) for _ in range(THREAD_LIMIT)]
    for _ in tasks:
        while not started.acquire(blocking=False):
            await asyncio.sleep(0.001)
    yield
    released.set()
    await asyncio.gather(*tasks)


async def test_a_call_may_return_just_before_its_cancellation_arrives(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    started, reported = threading.Event(), threading.Event()
    call_soon = loop.call_soon_threadsafe

    def call_soon_and_note(callback: Callable[[], object]) -> None:
        call_soon(callback)
        reported.set()

    def work() -> None:
        started.set()
        released.wait(PATIENCE_S)

    task = asyncio.create_task(run_blocking(work))
    await until(started)
    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon_and_note)
    # The loop must cancel the task before it receives the call's result and resumes the task.
    loop.call_soon(task.cancel)
    released.set()
    assert reported.wait(PATIENCE_S)
    await asyncio.wait([task], timeout=PATIENCE_S)
    assert task.cancelled()


@pytest.mark.usefixtures("occupied")
async def test_a_call_cancelled_at_once_is_not_run(released: threading.Event) -> None:
    ran = threading.Event()
    task = asyncio.create_task(run_blocking(ran.set))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    # Calls run in order, so the cancelled call would have run before this one.
    await run_blocking(lambda: None)
    assert not ran.is_set()


@pytest.mark.usefixtures("occupied")
async def test_a_call_cancelled_at_once_holds_no_arguments() -> None:
    buffer = Buffer()
    seen = weakref.ref(buffer)
    task = asyncio.create_task(run_blocking(id, buffer))
    del buffer
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await asyncio.sleep(0)  # the loop's current callback still refers to the task
    gc.collect()
    assert seen() is None


@pytest.mark.usefixtures("occupied")
async def test_no_more_calls_than_the_limit_run_at_once(released: threading.Event) -> None:
    more = [asyncio.create_task(run_blocking(threading.current_thread)) for _ in range(50)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in more)
    released.set()
    assert len(set(await asyncio.gather(*more))) <= THREAD_LIMIT


async def test_an_idle_thread_is_used_again() -> None:
    threads = {await run_blocking(threading.current_thread) for _ in range(50)}
    # Allow some threads: a call starts a new one if the previous call's thread is not idle yet.
    assert len(threads) < 25


@pytest.mark.usefixtures("occupied")
async def test_one_loops_calls_do_not_take_anothers_threads() -> None:
    other: list[str] = []
    thread = threading.Thread(
        target=lambda: other.append(asyncio.run(run_blocking(lambda: "done"))), daemon=True
    )
    thread.start()
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert other == ["done"]


async def test_a_call_that_got_no_thread_is_not_run_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = threading.Event()
    with monkeypatch.context() as patch:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await run_blocking(ran.set)
    assert await run_blocking(lambda: "done") == "done"
    assert not ran.is_set()


def test_closing_ends_the_idle_threads() -> None:
    loop = asyncio.new_event_loop()
    thread = loop.run_until_complete(run_blocking(threading.current_thread))
    close_blocking_threads(loop)
    close_blocking_threads(loop)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    loop.close()


def test_the_threads_of_a_loop_that_is_gone_end() -> None:
    thread = asyncio.run(run_blocking(threading.current_thread))
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_hung_call_does_not_keep_the_interpreter_from_exiting() -> None:
    code = """
import asyncio, threading
from kvtier_sdk import run_blocking

async def main():
    started = threading.Event()
    task = asyncio.ensure_future(run_blocking(lambda: (started.set(), threading.Event().wait())))
    while not started.is_set():
        await asyncio.sleep(0)

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
print("leaving", flush=True)
"""
    assert run(code) == "leaving\n"
