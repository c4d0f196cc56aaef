"""A wrapper that makes a tier's calls fail, according to a script or at random."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from kvtier_sdk.contract import SecondaryTierManager, TierContext
from kvtier_sdk.errors import TierError, TierUnavailableError
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.options.tier import TierConfig
from kvtier_sdk.types import Entry, OffloadKey, RequestContext, Transfer, Usage

#: Class attributes that a faulty tier class copies from the wrapped class.
_DECLARED = (
    *("config_model", "medium", "locality", "capabilities", "alignment", "max_batch_keys"),
    *("fixed_length", "runner_defaults", "contract_version"),
)


class FaultKind(Enum):
    """The kinds of fault that a plan can inject into a call."""

    #: The call raises :attr:`Fault.error`.
    ERROR = "error"
    #: The call begins after :attr:`Fault.delay_s` seconds.
    DELAY = "delay"
    #: The call does not end unless it is cancelled.
    HANG = "hang"
    #: Each chunk is truncated: a store writes a shorter object if the tier supports it, and a load
    #: fills the end with zeros.
    SHORT = "short"
    #: The call succeeds, with one bit of each chunk flipped.
    CORRUPT = "corrupt"
    #: Each chunk in the second half of the batch fails with :attr:`Fault.error` without a call.
    PARTIAL = "partial"
    #: All calls raise :class:`TierUnavailableError` for :attr:`Fault.delay_s` seconds.
    DISCONNECT = "disconnect"


@dataclass(frozen=True)
class Fault:
    """A fault for one call.

    Attributes:
        kind: the kind of fault.
        operation: the name of the call that gets the fault, such as ``"lookup"``. ``None`` stands
            for any call except ``usage``, because the runner calls ``usage`` on its own schedule.
        delay_s: seconds that a delay or an outage lasts, on the tier's clock.
        error: the class of the errors that the fault causes.
    """

    kind: FaultKind
    operation: str | None = None
    delay_s: float = 1.0
    error: type[TierError] = TierUnavailableError


class FaultPlan:
    """A plan of faults for future calls: first the script's faults, then random ones.

    Attributes:
        happened: the faults so far, as pairs of an operation and a kind.

    Args:
        script: the faults, in order. A call gets the first fault that fits its operation. ``None``
            leaves one call without a fault.
        seed: the seed of the random faults.
        rate: the probability, 0 to 1, that a call gets a fault once the script is used up.
        drawn: the faults from which random ones are drawn; by default one of each kind.
    """

    def __init__(
        self,
        script: Iterable[Fault | None] = (),
        *,
        seed: int = 0,
        rate: float = 0.0,
        drawn: Sequence[Fault] | None = None,
    ) -> None:
        self.happened: list[tuple[str, FaultKind]] = []
        self._script = deque(script)
        self._random = random.Random(seed)
        self._rate = rate
        self._drawn = [Fault(kind) for kind in FaultKind] if drawn is None else list(drawn)

    def next_fault(self, operation: str) -> Fault | None:
        """Record and return the fault for a call of ``operation``; return ``None`` for no fault."""
        fault = self._from_script(operation) if self._script else self._from_seed(operation)
        if fault is not None:
            self.happened.append((operation, fault.kind))
        return fault

    def _from_script(self, operation: str) -> Fault | None:
        for index, fault in enumerate(self._script):
            if _fits(fault, operation):
                del self._script[index]
                return fault
        return None

    def _from_seed(self, operation: str) -> Fault | None:
        fitting = [fault for fault in self._drawn if _fits(fault, operation)]
        if not fitting or self._random.random() >= self._rate:
            return None
        return self._random.choice(fitting)


def _fits(fault: Fault | None, operation: str) -> bool:
    named = None if fault is None else fault.operation
    return named == operation or (named is None and operation != "usage")


class FaultyTier(SecondaryTierManager):
    """A tier that passes every call on to a wrapped tier, and injects the faults of a plan.

    A fault that does not fit its call, such as ``PARTIAL`` for a lookup, has no effect.

    Attributes:
        inner_class: the class of the wrapped tier.
        plan: the faults; every instance of the class shares them.
        inner: the wrapped tier.
    """

    inner_class: ClassVar[type[SecondaryTierManager]]
    plan: ClassVar[FaultPlan]

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.inner: SecondaryTierManager = self.inner_class(config, context)
        self._unreachable_until_s = float("-inf")

    async def open(self) -> None:
        await self.inner.open()

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        await self._take_fault("lookup")
        return await self.inner.lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        fault = await self._take_fault("store")
        if fault is None:
            return await self.inner.store(batch)
        if fault.kind is FaultKind.PARTIAL:
            return await self._half(self.inner.store, batch, fault)
        return await self.inner.store([self._damaged(transfer, fault.kind) for transfer in batch])

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        fault = await self._take_fault("load")
        if fault is None:
            return await self.inner.load(batch)
        if fault.kind is FaultKind.PARTIAL:
            return await self._half(self.inner.load, batch, fault)
        # Pass copies, because the wrapped tier would verify the originals before the damage.
        inside = [transfer.with_payload(transfer.payload) for transfer in batch]
        verdicts = await self.inner.load(inside)
        for transfer, copy, verdict in zip(batch, inside, verdicts, strict=True):
            if verdict is None:
                transfer.received(len(copy.header) + len(copy.arrived))
                _damage(transfer.arrived, fault.kind)
        return verdicts

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._take_fault("delete")
        await self.inner.delete(keys)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self._take_fault("touch")
        await self.inner.touch(keys)

    async def scan(self) -> AsyncIterator[Entry]:
        await self._take_fault("scan")
        async for entry in self.inner.scan():
            yield entry

    async def usage(self) -> Usage:
        await self._take_fault("usage")
        return await self.inner.usage()

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        await self._take_fault("namespaces")
        async for namespace in self.inner.namespaces():
            yield namespace

    async def close(self) -> None:
        await self.inner.close()

    async def _take_fault(self, operation: str) -> Fault | None:
        """Apply the next fault, or return it if the caller must apply it chunk by chunk."""
        clock = self.context.clock
        fault = self.plan.next_fault(operation)
        if fault is not None and fault.kind is FaultKind.DISCONNECT:
            self._unreachable_until_s = clock.now_s() + fault.delay_s
        if clock.now_s() < self._unreachable_until_s:
            raise TierUnavailableError("disconnected by a fault")
        if fault is None:
            return None
        if fault.kind is FaultKind.ERROR:
            raise fault.error("failed by a fault")
        if fault.kind is FaultKind.HANG:
            await asyncio.Event().wait()
        if fault.kind is FaultKind.DELAY:
            await clock.sleep(fault.delay_s)
            return None
        return fault

    async def _half(
        self,
        move: Callable[[Sequence[Transfer]], Awaitable[Sequence[TierError | None]]],
        batch: Sequence[Transfer],
        fault: Fault,
    ) -> Sequence[TierError | None]:
        done = -(-len(batch) // 2)
        verdicts = list(await move(batch[:done]))
        return verdicts + [fault.error("failed by a fault") for _ in batch[done:]]

    def _damaged(self, transfer: Transfer, kind: FaultKind) -> Transfer:
        """Return a damaged copy, because a store must not change its buffers."""
        kept = len(transfer.payload) // 2 // self.alignment * self.alignment
        if kind is FaultKind.SHORT and kept and not self.fixed_length:
            return transfer.with_payload(transfer.payload[:kept])
        # Use a mapping, because its page alignment satisfies any tier's requirement.
        copy = memoryview(mmap.mmap(-1, len(transfer.payload)))
        copy[:] = transfer.payload
        _damage(copy, kind)
        return transfer.with_payload(copy)


def faulty(tier_class: type[SecondaryTierManager], plan: FaultPlan) -> type[FaultyTier]:
    """Make a tier class with the options and capabilities of ``tier_class`` and a plan's faults.

    Run tiers of this class in a thread, because a child process would not have the ``plan``.
    """
    declared = {name: getattr(tier_class, name) for name in _DECLARED}
    own = {"inner_class": tier_class, "plan": plan, "__module__": __name__}
    return type(f"Faulty{tier_class.__name__}", (FaultyTier,), declared | own)


def _damage(payload: memoryview, kind: FaultKind) -> None:
    middle = len(payload) // 2
    if kind is FaultKind.SHORT:
        payload[middle:] = bytes(len(payload) - middle)
    else:
        payload[middle] ^= 1
