"""Checks that a closed tier leaves no task, thread, file descriptor or buffer behind."""

from __future__ import annotations

import asyncio
import os
import threading

from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.exercise import run_on_new_loop, run_tier, wait_until_gone
from kvtier_sdk.testing.conformance.probe import Probe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject

_NOTHING = "A closed tier leaves nothing behind: no task, thread, file descriptor or buffer."
_DESCRIPTORS = "/proc/self/fd"


@check(says=_NOTHING)
async def check_no_task_is_left(subject: TierSubject) -> None:
    """After close, no task of the tier runs on the loop."""
    before = asyncio.all_tasks()
    await run_tier(subject)

    def left() -> list[str]:
        return sorted(task.get_name() for task in asyncio.all_tasks() - before)

    if names := await wait_until_gone(subject, left):
        raise Breach(f"these tasks still run after close: {', '.join(names)}")


@check(says=_NOTHING)
async def check_no_thread_is_left(subject: TierSubject) -> None:
    """After the tier and its loop are closed, no thread of the tier runs."""
    # The first run starts threads that stay for good: those of the loop and of libraries.
    await run_on_new_loop(subject, lambda: run_tier(subject))
    before = set(threading.enumerate())
    await run_on_new_loop(subject, lambda: run_tier(subject))

    def left() -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - before)

    if names := await wait_until_gone(subject, left):
        raise Breach(f"these threads still run after close: {', '.join(names)}")


@check(says=_NOTHING)
async def check_no_descriptor_is_left(subject: TierSubject) -> None:
    """After the tier and its loop are closed, no file or socket of the tier is open."""
    await run_on_new_loop(subject, lambda: run_tier(subject))
    before = _descriptors()
    await run_on_new_loop(subject, lambda: run_tier(subject))

    def left() -> list[str]:
        return sorted(set(_descriptors().items()) - set(before.items()))  # type: ignore[arg-type]

    if left_open := await wait_until_gone(subject, left):
        raise Breach(
            f"these descriptors are still open after close: {', '.join(map(str, left_open))}"
        )


@check(says="Buffers belong to the SDK, which lends them until the coroutine returns.")
async def check_no_buffer_is_kept(subject: TierSubject) -> None:
    """Once a call has returned, with any outcome, nothing holds its buffers."""
    async with subject.opened() as probe:
        stored, absent, torn = subject.new_keys(3)
        await _check_given_back(probe, "store", probe.full(stored))
        await _check_given_back(probe, "load", probe.empty(stored))
        await _check_given_back(probe, "load", probe.empty(absent))
        if subject.has(Hook.WRITE_RAW) and await probe.put([torn]):
            await subject.call(Hook.WRITE_RAW, torn, b"short")
            await _check_given_back(probe, "load", probe.empty(torn))
        for operation in ("store", "load"):
            lent = probe.full(stored)
            task = probe.start(getattr(probe.tier, operation)([lent.transfer]), operation)
            await asyncio.sleep(0)
            task.cancel()
            if not await probe.ends(task):
                return
            del task
            await _check_taken_back(probe, f"a cancelled {operation}", lent)


async def _check_given_back(probe: Probe, operation: str, lent: LentBuffers) -> None:
    await (probe.store([lent]) if operation == "store" else probe.load([lent]))
    await _check_taken_back(probe, f"a {operation}", lent)


async def _check_taken_back(probe: Probe, what: str, lent: LentBuffers) -> None:
    # A thread or callback that has just reported its outcome may hold them a moment longer.
    held = await wait_until_gone(probe.subject, lambda: [] if lent.take_back() else ["buffers"])
    if held:
        raise Breach(f"{lent.holder()} still holds the buffers of {what} that has returned")


def _descriptors() -> dict[str, str]:
    """Return the open descriptors, each with the file or socket behind it."""
    found = {}
    for number in os.listdir(_DESCRIPTORS):
        try:
            found[number] = os.readlink(f"{_DESCRIPTORS}/{number}")
        except OSError:
            continue  # the descriptor of this very listing
    return found
