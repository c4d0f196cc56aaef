"""A tier whose calls fail, according to a script or at random."""

# mypy considers the base class's methods abstract, but :func:`faulty` adds a class that has them.
# mypy: disable-error-code="safe-super"

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import TierError, TierUnavailableError
from kvtier_sdk.types import OffloadKey, RequestContext, Transfer


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
    #: Only the first half of the batch reaches the tier. The rest fails with :attr:`Fault.error`.
    PARTIAL = "partial"
    #: Calls raise :class:`TierUnavailableError` for :attr:`Fault.delay_s` seconds.
    DISCONNECT = "disconnect"


@dataclass(frozen=True)
class Fault:
    """A fault for one call.

    Attributes:
        kind: the kind of fault.
        operation: ``"lookup"``, ``"store"``, ``"load"``, ``"delete"``, or ``None`` for any of them.
        delay_s: duration of a delay or an outage, in seconds of the tier's clock.
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
    """

    def __init__(
        self, script: Iterable[Fault | None] = (), *, seed: int = 0, rate: float = 0.0
    ) -> None:
        self.happened: list[tuple[str, FaultKind]] = []
        self._script = list(script)
        self._random = random.Random(seed)
        self._rate = rate

    def next_fault(self, operation: str) -> Fault | None:
        """Record and return the fault for a call of ``operation``; return ``None`` for no fault."""
        fault = None
        if self._script:
            fits = [of is None or of.operation in (None, operation) for of in self._script]
            if any(fits):
                fault = self._script.pop(fits.index(True))
        elif self._random.random() < self._rate:
            fault = Fault(self._random.choice(list(FaultKind)))
        if fault is not None:
            self.happened.append((operation, fault.kind))
        return fault


class FaultyTier(SecondaryTierManager):
    """A tier that injects the faults of a plan; the base of :func:`faulty`'s classes.

    Only lookups, stores, loads and deletions get faults. A fault that does not fit its call, such
    as ``PARTIAL`` for a lookup, has no effect.

    Attributes:
        plan: the faults; every instance of the class shares them.
    """

    plan: ClassVar[FaultPlan]
    _unreachable_until_s = float("-inf")

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        await self._take_fault("lookup")
        return await super().lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        fault = await self._take_fault("store")
        if fault is None:
            return await super().store(batch)
        if fault.kind is FaultKind.PARTIAL:
            return await _half(super().store, batch, fault)
        return await super().store([self._damaged(transfer, fault.kind) for transfer in batch])

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        fault = await self._take_fault("load")
        if fault is None:
            return await super().load(batch)
        if fault.kind is FaultKind.PARTIAL:
            return await _half(super().load, batch, fault)
        # Pass copies, on which verify() does nothing, so that a chunk is verified after its damage.
        inside = [transfer.with_payload(transfer.payload) for transfer in batch]
        verdicts = await super().load(inside)
        for transfer, copy, verdict in zip(batch, inside, verdicts, strict=True):
            if verdict is None:
                transfer.received(len(copy.header) + len(copy.arrived))
                _damage(transfer.arrived, fault.kind)
        return verdicts

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._take_fault("delete")
        await super().delete(keys)

    async def _take_fault(self, operation: str) -> Fault | None:
        """Apply the next fault and return ``None``, or return a fault for the caller to apply."""
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
    """Create a subclass of ``tier_class`` whose calls get the faults of a ``plan``.

    Run tiers of this class in a thread, because a child process would not have the ``plan``.
    """
    own = {"plan": plan, "__module__": __name__}
    return type(f"Faulty{tier_class.__name__}", (FaultyTier, tier_class), own)


async def _half(
    move: Callable[[Sequence[Transfer]], Awaitable[Sequence[TierError | None]]],
    batch: Sequence[Transfer],
    fault: Fault,
) -> Sequence[TierError | None]:
    done = -(-len(batch) // 2)
    verdicts = list(await move(batch[:done]))
    return verdicts + [fault.error("failed by a fault") for _ in batch[done:]]


def _damage(payload: memoryview, kind: FaultKind) -> None:
    middle = len(payload) // 2
    if kind is FaultKind.SHORT:
        payload[middle:] = bytes(len(payload) - middle)
    else:
        payload[middle] ^= 1
