"""Checks of what a closed tier leaves behind: no task, thread, file descriptor or buffer."""

from __future__ import annotations

import asyncio
import os
import threading

from kvtier_sdk.testing.conformance.buffers import LentBuffers
from kvtier_sdk.testing.conformance.exercise import live, on_a_loop_of_its_own, vanishes
from kvtier_sdk.testing.conformance.probe import Probe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject

_NOTHING = "A closed tier leaves nothing behind: no task, thread, file descriptor or buffer."
_DESCRIPTORS = "/proc/self/fd"


@check(says=_NOTHING)
async def check_no_task_is_left(subject: TierSubject) -> None:
    """When a tier has been closed, no task of its runs on the loop."""
    before = asyncio.all_tasks()
    await live(subject)

    def left() -> list[str]:
        return sorted(task.get_name() for task in asyncio.all_tasks() - before)

    if names := await vanishes(subject, left):
        raise Breach(f"after close these tasks still run: {', '.join(names)}")


@check(says=_NOTHING)
async def check_no_thread_is_left(subject: TierSubject) -> None:
    """When a tier and its loop have been closed, no thread of its runs."""
    # The first life starts what is there once for all: threads of the loop, of libraries.
    await on_a_loop_of_its_own(subject, lambda: live(subject))
    before = set(threading.enumerate())
    await on_a_loop_of_its_own(subject, lambda: live(subject))

    def left() -> list[str]:
        return sorted(thread.name for thread in set(threading.enumerate()) - before)

    if names := await vanishes(subject, left):
        raise Breach(f"after close these threads still run: {', '.join(names)}")


@check(says=_NOTHING)
async def check_no_descriptor_is_left(subject: TierSubject) -> None:
    """When a tier and its loop have been closed, no file or socket of its is open."""
    await on_a_loop_of_its_own(subject, lambda: live(subject))
    before = _descriptors()
    await on_a_loop_of_its_own(subject, lambda: live(subject))

    def left() -> list[str]:
        return sorted(set(_descriptors().items()) - set(before.items()))  # type: ignore[arg-type]

    if left_open := await vanishes(subject, left):
        raise Breach(f"after close these are still open: {', '.join(map(str, left_open))}")


@check(says="Buffers are the SDK's, lent until the coroutine has returned.")
async def check_no_buffer_is_kept(subject: TierSubject) -> None:
    """When a call has returned, whatever its outcome, nothing holds its buffers."""
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
            await _check_taken_back(probe, f"a {operation} that was cancelled", lent)


async def _check_given_back(probe: Probe, operation: str, lent: LentBuffers) -> None:
    await (probe.store([lent]) if operation == "store" else probe.load([lent]))
    await _check_taken_back(probe, f"a {operation}", lent)


async def _check_taken_back(probe: Probe, what: str, lent: LentBuffers) -> None:
    # A thread or a callback that has just told its outcome may be about to let go.
    async def taken() -> bool:
        return not await vanishes(
            probe.subject, lambda: [] if lent.take_back() else ["the buffers"]
        )

    if not await taken():
        raise Breach(f"after {what} had returned, something still holds its buffers")


def _descriptors() -> dict[str, str]:
    """Open descriptors, and what each is open to."""
    found = {}
    for number in os.listdir(_DESCRIPTORS):
        try:
            found[number] = os.readlink(f"{_DESCRIPTORS}/{number}")
        except OSError:
            continue  # the listing's own
    return found
