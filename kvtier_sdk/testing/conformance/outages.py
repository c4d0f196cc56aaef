"""Checks of a tier while its store is unreachable or hangs, and after it has recovered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from itertools import cycle
from typing import Any

from kvtier_sdk.aio.clock import Clock, wait_out
from kvtier_sdk.errors import TierError, TierTimeoutError, TierUnavailableError
from kvtier_sdk.testing.conformance.probe import Probe, describe
from kvtier_sdk.testing.conformance.rules import Breach, Hook, check, check_opened
from kvtier_sdk.testing.conformance.subject import TierSubject
from kvtier_sdk.types import Capability, OffloadKey

_RETRYABLE = "true if the same call may soon succeed"
_UNREACHABLE = "the store is unreachable"
_HANGS = "the store hangs"
#: Larger than a socket's buffers, because an outage cannot interrupt a smaller transfer.
_CHUNK_BYTES = 1 << 20
_MOVERS = 4
_PAUSE_S = 0.0002
_LOOKS = 200


@check_opened(
    Hook.BREAK_CONNECTION, says="An outage is a TierUnavailableError, never False from lookup."
)
async def check_an_outage_is_no_miss(subject: TierSubject, probe: Probe) -> None:
    """While the store is unreachable, every call that needs it fails with TierUnavailableError."""
    stored = await probe.put(subject.new_keys(1))
    (absent,) = subject.new_keys(1)
    await subject.call(Hook.BREAK_CONNECTION)
    try:
        for key in (absent, *stored):
            _check_answer(_UNREACHABLE, "lookup", await _answer(_lookup(probe, key)))
            _check_answer(_UNREACHABLE, "load", await _answer(_load(probe, key)))
        _check_answer(_UNREACHABLE, "store", await _answer(_store(probe, absent)))
        if stored and Capability.DELETE in subject.tier_class.capabilities:
            _check_error("delete", await _answer(probe.delete(stored)))
        if Capability.SCAN in subject.tier_class.capabilities:
            _check_error("scan", await _answer(probe.scan()))
    finally:
        if subject.has(Hook.RESTORE_CONNECTION):
            await subject.call(Hook.RESTORE_CONNECTION)


@check(
    Hook.BREAK_CONNECTION,
    Hook.RESTORE_CONNECTION,
    says="No reader ever sees a partly written object, even if a store fails midway.",
)
async def check_an_outage_in_mid_transfer_damages_nothing(subject: TierSubject) -> None:
    """An outage during a transfer never makes a load return wrong bytes."""
    async with subject.opened(chunk_bytes=_CHUNK_BYTES) as probe:
        for breach in await _breaches_in_an_outage(probe):
            raise breach


@check(Hook.BREAK_CONNECTION, Hook.RESTORE_CONNECTION, says=_RETRYABLE)
async def check_a_tier_comes_back_after_an_outage(subject: TierSubject) -> None:
    """After an outage the tier works again, without being reopened."""
    async with subject.opened(chunk_bytes=_CHUNK_BYTES) as probe:
        await _breaches_in_an_outage(probe)
        await _check_recovery(probe, "outage")


@check_opened(Hook.FREEZE, Hook.UNFREEZE, says="The tier did not answer in time.")
async def check_a_hang_is_no_miss(subject: TierSubject, probe: Probe) -> None:
    """While the store hangs, calls wait, or fail with TierTimeoutError or TierUnavailableError."""
    keys = await probe.put_all(2)
    for operation, answer in (await _answers_of_a_hung_store(probe, keys)).items():
        if not isinstance(answer, TierTimeoutError):
            _check_answer(_HANGS, operation, answer)


@check_opened(Hook.FREEZE, Hook.UNFREEZE, says=_RETRYABLE)
async def check_a_tier_comes_back_after_a_hang(subject: TierSubject, probe: Probe) -> None:
    """After a hang the tier works again, without being reopened."""
    keys = await probe.put_all(2)
    await _answers_of_a_hung_store(probe, keys)
    await _check_recovery(probe, "hang")
    await probe.expect(keys[0], 0)


async def _lookup(probe: Probe, key: OffloadKey) -> bool:
    (answer,) = await probe.lookup([key])
    return answer


async def _load(probe: Probe, key: OffloadKey) -> TierError | None:
    lent = probe.empty(key)
    (verdict,) = await probe.load([lent])
    if verdict is None:
        # The chunk can come from a cache of the tier, but it must be whole.
        probe.check_content(key, lent.content, [0])
    return verdict


async def _store(probe: Probe, key: OffloadKey) -> TierError | None:
    (verdict,) = await probe.store([probe.full(key)])
    return verdict


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except TierError as error:
        return error


def _check_answer(state: str, operation: str, answer: Any) -> None:
    """Require an outage error or a success, because the tier may answer from a cache."""
    if answer is not None and answer is not True:
        _check_error(operation, answer, state)


def _check_error(operation: str, answer: Any, state: str = _UNREACHABLE) -> None:
    if not isinstance(answer, TierUnavailableError):
        is_error = isinstance(answer, TierError)
        given = f"gave {describe(answer)}" if is_error else f"returned {answer}"
        raise Breach(f"{state}, and {operation} {given}")


async def _check_recovery(probe: Probe, disturbance: str) -> None:
    """Require a successful lookup within the timeout, then a store and a load."""
    subject = probe.subject
    end_s = subject.clock.now_s() + subject.timeout_s
    while isinstance(error := await _answer(probe.lookup(subject.new_keys(1))), TierError):
        if subject.clock.now_s() > end_s:
            raise Breach(
                f"{subject.timeout_s:g} s after the end of the {disturbance}, lookup still gives "
                f"{describe(error)}"
            )
        await subject.clock.sleep(subject.settle_s)
    for key in await probe.put(subject.new_keys(1)):
        await probe.expect(key, 0)


async def _answers_of_a_hung_store(probe: Probe, keys: Sequence[OffloadKey]) -> Mapping[str, Any]:
    """Make each kind of call while the store hangs; return the answers of the calls that end."""
    subject = probe.subject
    (absent,) = subject.new_keys(1)
    tasks: dict[str, asyncio.Task[Any]] = {}
    await subject.call(Hook.FREEZE)
    try:
        calls: dict[str, Coroutine[Any, Any, Any]] = {
            "lookup": _lookup(probe, keys[0]),
            "load": _load(probe, keys[0]),
            "store": _store(probe, absent),
        }
        if Capability.DELETE in probe.tier.capabilities:
            calls["delete"] = probe.delete(keys[1:])
        for operation, call in calls.items():
            tasks[operation] = probe.start(_answer(call), f"{operation} of a store that hangs")
        await asyncio.wait(tasks.values(), timeout=subject.hang_s)
        answers = {name: task.result() for name, task in tasks.items() if task.done()}
        for operation, task in tasks.items():
            task.cancel()
            if not await probe.ends(task):
                raise Breach(f"{_HANGS}, and a cancelled {operation} did not end")
    finally:
        for task in tasks.values():
            task.cancel()
        await subject.call(Hook.UNFREEZE)
    return answers


async def _breaches_in_an_outage(probe: Probe) -> list[Breach]:
    """Store and load chunks before, during and after an outage; return the breaches."""
    subject = probe.subject
    movers = [_Mover(probe, key) for key in subject.new_keys(_MOVERS)]
    tasks: list[asyncio.Task[None]] = []
    try:
        for mover in movers:
            tasks.append(probe.start(mover.move(), "store and load a chunk"))
            # Start the movers at different times, so that stores overlap with loads.
            await subject.clock.sleep(_PAUSE_S)
        await _moved_on(subject.clock, movers)
        await _in_mid_transfer(subject.clock, movers)
        await subject.call(Hook.BREAK_CONNECTION)
        try:
            await _moved_on(subject.clock, movers)
        finally:
            await subject.call(Hook.RESTORE_CONNECTION)
        await _moved_on(subject.clock, movers)
    finally:
        for mover in movers:
            mover.goes_on = False
        await wait_out(tasks)
    return [breach for mover in movers for breach in mover.breaches]


class _Mover:
    """A worker that alternately stores and loads a chunk until ``goes_on`` is false."""

    def __init__(self, probe: Probe, key: OffloadKey) -> None:
        self.calls = 0
        self.doing = ""
        self.goes_on = True
        self.breaches: list[Breach] = []
        self._probe = probe
        self._content = probe.content(key)
        self._empty = bytes(len(self._content))
        self._lent = probe.empty(key)

    async def move(self) -> None:
        probe, lent = self._probe, self._lent
        for operation in cycle(("store", "load")):
            if not self.goes_on:
                return
            self.doing = operation
            try:
                if operation == "store":
                    lent.fill(self._content)
                    await probe.store([lent])
                else:
                    lent.fill(self._empty)
                    verdicts = await probe.load([lent])
                    if verdicts == [None] and lent.content != self._content:
                        probe.check_content(lent.key, lent.content, [0])
            except Breach as breach:
                self.breaches.append(breach)
            self.doing = ""
            self.calls += 1
            # Pause, because a tier that answers immediately would otherwise block the other movers.
            await probe.subject.clock.sleep(_PAUSE_S)


async def _moved_on(clock: Clock, movers: Sequence[_Mover]) -> None:
    """Wait until each mover has ended its current call and two more: a store and a load."""
    start = [mover.calls for mover in movers]
    while any(mover.calls < before + 3 for mover, before in zip(movers, start, strict=True)):
        await clock.sleep(_PAUSE_S)


async def _in_mid_transfer(clock: Clock, movers: Sequence[_Mover]) -> None:
    """Wait until a store and a load overlap. Give up after a while, if the tier is too fast."""
    for _ in range(_LOOKS):
        if {"store", "load"} <= {mover.doing for mover in movers}:
            return
        await clock.sleep(_PAUSE_S)
