"""Checks of opening and closing, of leaked resources, and of a blocked event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from kvtier_sdk.aio.clock import wait_out
from kvtier_sdk.errors import ConfigError, TierError
from kvtier_sdk.runner.loop_thread import end_event_loop
from kvtier_sdk.runner.opening import may_pass
from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.probe import Probe, describe, start_and_cancel
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check, check_opened
from kvtier_sdk.testing.conformance.subject import TierSubject, tier_spec
from kvtier_sdk.types import Capability, Medium

_NOTHING = "A closed tier leaves nothing behind: no task, thread, file descriptor or buffer."
_DESCRIPTORS = "/proc/self/fd"
_MANY = 64
#: Number of polls by :func:`_wait_until_gone`, one every ``settle_s`` seconds.
_SETTLINGS = 20
_POLL_S = 0.002
#: The loop counts as blocked if it does not run during this many wake-ups of the watch thread.
_WAKES = 20
_Found = Callable[[], Mapping[Any, str]]


@check_opened(says="Release everything in bounded time, even if open failed.")
async def check_close_ends(subject: TierSubject, probe: Probe) -> None:
    """Close ends soon, whether or not the tier was used."""
    await _use(probe)
    await probe.close()
    async with subject.opened() as unused:
        await unused.close()


@check_opened(says="A second close does nothing.")
async def check_closing_twice_is_harmless(subject: TierSubject, probe: Probe) -> None:
    """A second close does nothing."""
    await probe.put(subject.new_keys(1))
    await probe.close()
    await probe.close()


@check_opened(says="Running calls end, with a result or an error.")
async def check_close_ends_what_runs(subject: TierSubject, probe: Probe) -> None:
    """Close ends, and so do all calls that run at that time."""
    (key,) = subject.new_keys(1)
    await probe.put([key])
    transfers = [probe.empty(key).transfer for _ in range(8)]
    calls = [probe.start(probe.tier.load([one]), "running at close") for one in transfers]
    await asyncio.sleep(0)
    await probe.close()
    _, running = await asyncio.wait(calls, timeout=subject.timeout_s)
    for call in running:
        call.cancel()
    if running:
        raise Breach(f"a load had not ended {subject.timeout_s:g} s after close")
    # Any outcome is allowed. Retrieve errors, so that asyncio does not log them.
    await asyncio.gather(*calls, return_exceptions=True)


@check(
    Hook.BAD_SETTINGS,
    says="Neither is retried. During an outage, the SDK retries the opening.",
)
async def check_bad_settings_fail_in_open(subject: TierSubject) -> None:
    """An unusable setting makes open fail permanently, and close still works afterwards."""
    for what, tier in (subject.bad_settings or {}).items():
        spec = tier_spec(tier)
        probe = Probe(subject, subject.make(spec))
        try:
            await probe.open()
        except (ConfigError, TierError) as error:
            if may_pass(error):
                raise Breach(
                    f"a bad setting ({what}) gave {describe(error)}; that is an outage, and open "
                    "is tried again for ever"
                ) from error
            await probe.close()
            continue
        finally:
            await probe.clean_up()
        raise Breach(f"open succeeded with a bad setting: {what}")


@check(says="Closing one does not affect the others.")
async def check_instances_are_independent(subject: TierSubject) -> None:
    """An instance keeps working when another instance in the same place is closed."""
    async with subject.opened() as first, subject.opened() as second:
        await first.put(subject.new_keys(1))
        await first.close()
        await second.expect(await second.put_one(), 0)


@check_opened(Medium.STORAGE, says="None if later calls of load find the chunk.")
async def check_chunks_outlive_the_instance(subject: TierSubject, probe: Probe) -> None:
    """An instance finds the chunks that an earlier instance stored."""
    key = await probe.put_one()
    await probe.close()
    async with subject.opened() as later:
        if await later.lookup([key]) != [True]:
            raise Breach("lookup does not find a chunk that an earlier instance stored")
        await later.expect(key, 0, what="a chunk that an earlier instance stored")


@check(says=_NOTHING)
async def check_no_task_is_left(subject: TierSubject) -> None:
    """After close, no task of the tier runs on the loop."""
    before = _tasks()
    await _run_tier(subject)
    await _check_gone(subject, _tasks, before, "tasks still run")


@check(says=_NOTHING)
async def check_no_thread_is_left(subject: TierSubject) -> None:
    """After the tier and its loop are closed, no thread of the tier runs."""
    await _check_left(subject, _threads, "threads still run")


@check(says=_NOTHING)
async def check_no_descriptor_is_left(subject: TierSubject) -> None:
    """After the tier and its loop are closed, no file or socket of the tier is open."""
    await _check_left(subject, _descriptors, "descriptors are still open")


async def _check_left(subject: TierSubject, found: _Found, what: str) -> None:
    # Run the tier once before counting, because some libraries start threads that never end.
    await _run_on_new_loop(subject)
    before = found()
    await _run_on_new_loop(subject)
    await _check_gone(subject, found, before, what)


@check_opened(says="Buffers belong to the SDK, which lends them until the coroutine ends.")
async def check_no_buffer_is_kept(subject: TierSubject, probe: Probe) -> None:
    """After a call has ended, with any outcome, no reference to its buffers remains."""
    stored, absent, torn = subject.new_keys(3)
    await _check_given_back(probe, "store", probe.full(stored))
    await _check_given_back(probe, "load", probe.empty(stored))
    await _check_given_back(probe, "load", probe.empty(absent))
    if subject.has(Hook.WRITE_RAW) and await probe.put([torn]):
        await subject.call(Hook.WRITE_RAW, torn, b"short")
        await _check_given_back(probe, "load", probe.empty(torn))
    for operation in ("store", "load"):
        lent = probe.full(stored)
        if not await start_and_cancel(probe, operation, lent):
            return
        await _check_taken_back(probe, f"a cancelled {operation}", lent)


async def _check_given_back(probe: Probe, operation: str, lent: LentBuffers) -> None:
    await (probe.store([lent]) if operation == "store" else probe.load([lent]))
    await _check_taken_back(probe, f"a {operation}", lent)


async def _check_taken_back(probe: Probe, what: str, lent: LentBuffers) -> None:
    # Wait, because a worker thread may drop its reference to the buffers shortly after the call.
    held = await _wait_until_gone(probe.subject, lambda: [] if lent.take_back() else ["buffers"])
    if held:
        raise Breach(f"something still refers to the buffers of {what} that has returned")


async def _check_gone(
    subject: TierSubject, found: _Found, before: Mapping[Any, str], what: str
) -> None:
    def left() -> list[str]:
        return sorted(name for thing, name in found().items() if thing not in before)

    if names := await _wait_until_gone(subject, left):
        raise Breach(f"these {what} after close: {', '.join(names)}")


def _tasks() -> dict[Any, str]:
    return {task: task.get_name() for task in asyncio.all_tasks()}


def _threads() -> dict[Any, str]:
    return {thread: thread.name for thread in threading.enumerate()}


def _descriptors() -> dict[Any, str]:
    found: dict[Any, str] = {}
    for number in os.listdir(_DESCRIPTORS):
        # Ignore the descriptor of the listing itself, which is closed by now.
        with contextlib.suppress(OSError):
            place = os.readlink(f"{_DESCRIPTORS}/{number}")
            found[number, place] = f"{number} ({place})"
    return found


@check(says="A tier never blocks that loop")
async def check_the_loop_is_never_blocked(subject: TierSubject) -> None:
    """From open to close, the tier never blocks the event loop."""
    async with _watched_loop(subject) as blocked_at, subject.opened() as probe:
        await _use(probe)
        await probe.lookup(subject.new_keys(_MANY))
        await probe.store([probe.full(key) for key in subject.new_keys(_MANY)])
    for place in blocked_at:
        raise Breach(f"the event loop stood still for {subject.blocking_s:g} s in\n{place}")


async def _use(probe: Probe) -> None:
    """Make several calls to the tier. Ignore errors, because other checks judge the outcomes."""
    keys = probe.subject.new_keys(3)
    with contextlib.suppress(Breach, TierError):
        await probe.store([probe.full(key) for key in keys[:2]])
        await probe.lookup(keys)
        await probe.load([probe.empty(key) for key in keys])
        for operation in ("store", "load"):
            await start_and_cancel(probe, operation, probe.full(keys[0]))
        if Capability.SCAN in probe.tier.capabilities:
            await probe.scan()
        if Capability.USAGE in probe.tier.capabilities:
            await probe.bounded(probe.tier.usage(), "usage")


async def _run_tier(subject: TierSubject) -> None:
    async with subject.opened() as probe:
        await _use(probe)


async def _run_on_new_loop(subject: TierSubject) -> None:
    """Run the tier on a new event loop in another thread, and close that loop."""
    raised: list[BaseException] = []

    def run() -> None:
        loop = subject.clock.new_event_loop()
        try:
            loop.run_until_complete(_run_tier(subject))
        except BaseException as error:
            raised.append(error)
        finally:
            end_event_loop(loop, subject.clock)

    # Do not use run_blocking, because its threads live until the check's own loop is closed.
    thread = threading.Thread(target=run, name="new loop", daemon=True)
    thread.start()
    while thread.is_alive():
        await subject.clock.sleep(_POLL_S)
    if raised:
        raise raised.pop()


async def _wait_until_gone(subject: TierSubject, left: Callable[[], list[str]]) -> list[str]:
    """Poll ``left`` until it returns an empty list or time is up; return its last result."""
    for _ in range(_SETTLINGS):
        if not left():
            return []
        await subject.clock.sleep(subject.settle_s)
    return left()


@asynccontextmanager
async def _watched_loop(subject: TierSubject) -> AsyncIterator[list[str]]:
    """Watch the loop from a thread, which adds the stack of a blocking call to the yielded list."""
    interval_s = subject.blocking_s / _WAKES
    loop_thread = threading.get_ident()
    blocked_at: list[str] = []
    over = threading.Event()
    turns = 0

    async def beat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await subject.clock.sleep(interval_s / 4)

    def watch() -> None:
        # Count wake-ups, not time, because a busy machine delays this thread as much as the loop.
        seen, wakes = -1, 0
        while not blocked_at and not over.wait(interval_s):
            wakes = wakes + 1 if turns == seen else 0
            seen = turns
            if wakes >= _WAKES:
                frame = sys._current_frames().get(loop_thread)
                blocked_at.append("".join(traceback.format_stack(frame, limit=12)[-3:]))

    heartbeat = subject.clock.spawn(beat(), name="heartbeat")
    thread = threading.Thread(target=watch, name="loop watch", daemon=True)
    thread.start()
    try:
        yield blocked_at
    finally:
        over.set()
        heartbeat.cancel()
        await wait_out([heartbeat])
        thread.join()
