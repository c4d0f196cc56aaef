"""Checks of a store that hangs: it can be reached, but answers nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kvtier_sdk.errors import TierError, TierTimeoutError, TierUnavailableError
from kvtier_sdk.testing.conformance.outage import wait_for_recovery
from kvtier_sdk.testing.conformance.probe import Probe, describe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability, OffloadKey

_HUNG = (TierTimeoutError, TierUnavailableError)


@check(Hook.FREEZE, Hook.UNFREEZE, says="The tier did not answer in time.")
async def check_a_hang_is_no_miss(subject: TierSubject) -> None:
    """A call of a store that hangs waits, or gives a TierTimeoutError or TierUnavailableError."""
    async with subject.opened() as probe:
        keys = await probe.put(subject.new_keys(2))
        if not keys:
            return
        for operation, answer in (await _answers_of_a_hung_store(probe, keys)).items():
            # A tier may have the chunk in a cache.
            is_right = answer is None or answer == [True]
            if not is_right and not isinstance(answer, _HUNG):
                is_error = isinstance(answer, TierError)
                given = f"gave {describe(answer)}" if is_error else f"returned {answer}"
                raise Breach(f"the store hangs, and {operation} {given}")


@check(Hook.FREEZE, Hook.UNFREEZE, says="whether the same call may succeed in a moment")
async def check_a_tier_comes_back_after_a_hang(subject: TierSubject) -> None:
    """When its store goes on after a hang, the tier works again, without being reopened."""
    async with subject.opened() as probe:
        keys = await probe.put(subject.new_keys(2))
        if not keys:
            return
        await _answers_of_a_hung_store(probe, keys)
        error = await wait_for_recovery(probe)
        if error is not None:
            raise Breach(
                f"{subject.timeout_s:g} s after the end of the hang, lookup still gives "
                f"{describe(error)}"
            )
        await probe.expect(keys[0], 0)
        if (key := await probe.put_one()) is not None:
            await probe.expect(key, 0)


async def _answers_of_a_hung_store(probe: Probe, keys: Sequence[OffloadKey]) -> Mapping[str, Any]:
    """Make each call while the store hangs; return the answers, and cancel the waiting calls.

    Raises:
        Breach: a load succeeded with wrong bytes, or a cancelled call did not end.
    """
    subject = probe.subject
    tasks: dict[str, asyncio.Task[Any]] = {}
    await subject.call(Hook.FREEZE)
    try:
        for operation, call in _calls(probe, keys).items():
            tasks[operation] = probe.start(_answer(call), f"{operation} of a store that hangs")
        await asyncio.wait(tasks.values(), timeout=subject.hang_s)
        answers = {name: task.result() for name, task in tasks.items() if task.done()}
        for operation, task in tasks.items():
            task.cancel()
            if not await probe.ends(task):
                raise Breach(f"the store hangs, and a cancelled {operation} did not end")
    finally:
        for task in tasks.values():
            task.cancel()
        await subject.call(Hook.UNFREEZE)
    return answers


def _calls(
    probe: Probe, keys: Sequence[OffloadKey]
) -> Mapping[str, Callable[[], Coroutine[Any, Any, Any]]]:
    (absent,) = probe.subject.new_keys(1)

    async def load() -> TierError | None:
        lent = probe.empty(keys[0])
        (verdict,) = await probe.load([lent])
        if verdict is None:
            # A tier may have the chunk in a cache, but then whole.
            probe.check_content(keys[0], lent.content, [0])
        return verdict

    async def store() -> TierError | None:
        (verdict,) = await probe.store([probe.full(absent)])
        return verdict

    async def delete() -> None:
        await probe.bounded(probe.tier.delete(keys[1:]), "delete")

    calls: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "lookup": lambda: probe.lookup([keys[0]]),
        "load": load,
        "store": store,
    }
    if keys[1:] and Capability.DELETE in probe.tier.capabilities:
        calls["delete"] = delete
    return calls


async def _answer(call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    try:
        return await call()
    except TierError as error:
        return error
