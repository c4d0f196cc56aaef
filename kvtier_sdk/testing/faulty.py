"""A tier around another one in which things go wrong, as a script or a seed says."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from kvtier_sdk.contract import SecondaryTierManager, TierContext
from kvtier_sdk.errors import TierError, TierUnavailableError
from kvtier_sdk.options.tier import TierConfig
from kvtier_sdk.types import Entry, OffloadKey, RequestContext, Transfer, Usage


class FaultKind(Enum):
    """What can go wrong in one call."""

    #: The call raises :attr:`Fault.error`.
    ERROR = "error"
    #: It begins :attr:`Fault.delay_s` later.
    DELAY = "delay"
    #: It never ends, unless it is cancelled.
    HANG = "hang"
    #: Of each chunk the end is missing: a store succeeds with a shorter object, a load with zeros.
    SHORT = "short"
    #: It succeeds, with one bit of each chunk flipped.
    CORRUPT = "corrupt"
    #: The second half of the batch is not done; each of it is :attr:`Fault.error`.
    PARTIAL = "partial"
    #: For :attr:`Fault.delay_s`, this call and all others are a :class:`TierUnavailableError`.
    DISCONNECT = "disconnect"


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a call.

    Attributes:
        kind: what it is.
        operation: ``"lookup"``, ``"store"``, ``"load"``, ``"delete"``, ``"touch"``, ``"scan"`` or
            ``"usage"``: the calls that it waits for; ``None`` takes whichever comes.
        delay_s: how long a delay or an outage lasts, on the tier's clock.
        error: class of the errors.
    """

    kind: FaultKind
    operation: str | None = None
    delay_s: float = 1.0
    error: type[TierError] = TierUnavailableError


class FaultPlan:
    """Which fault each call gets: those of a script, one after the other, then what a seed draws.

    Attributes:
        happened: the faults so far, with the operation of each.

    Args:
        script: a call takes the first that waits for its operation; ``None`` lets one call be.
        seed: of the draws.
        rate: the share of the other calls that get a fault, 0 to 1.
        drawn: what is drawn from; one of each kind where absent.
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
        """Take the fault of a call.

        Args:
            operation: which is called.

        Returns:
            What goes wrong; ``None`` where nothing does.
        """
        fault = self._from_script(operation) if self._script else self._from_seed(operation)
        if fault is not None:
            self.happened.append((operation, fault.kind))
        return fault

    def _from_script(self, operation: str) -> Fault | None:
        for index, fault in enumerate(self._script):
            if fault is None or fault.operation in (None, operation):
                del self._script[index]
                return fault
        return None

    def _from_seed(self, operation: str) -> Fault | None:
        if self._random.random() >= self._rate:
            return None
        fitting = [fault for fault in self._drawn if fault.operation in (None, operation)]
        return self._random.choice(fitting) if fitting else None


class FaultyTier(SecondaryTierManager):
    """Passes every call on to another tier, with a fault where its plan says so.

    Made by :func:`faulty`. Where a fault is not of a kind that fits a call (``PARTIAL`` of a
    lookup), the call is passed on as it is.

    Attributes:
        inner_class: the tier inside.
        plan: what goes wrong. Every instance of the class shares it.
        inner: the instance inside.
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
        await self._suffer("lookup")
        return await self.inner.lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        fault = await self._suffer("store")
        if fault is None:
            return await self.inner.store(batch)
        if fault.kind is FaultKind.PARTIAL:
            return await self._half(self.inner.store, batch, fault)
        return await self.inner.store([self._spoilt(transfer, fault.kind) for transfer in batch])

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        fault = await self._suffer("load")
        if fault is None:
            return await self.inner.load(batch)
        if fault.kind is FaultKind.PARTIAL:
            return await self._half(self.inner.load, batch, fault)
        verdicts = await self.inner.load(batch)
        for transfer, verdict in zip(batch, verdicts, strict=True):
            if verdict is None and fault.kind is FaultKind.SHORT:
                kept = len(transfer.payload) // 2
                transfer.payload[kept:] = bytes(len(transfer.payload) - kept)
            elif verdict is None:
                _flip(transfer.payload)
        return verdicts

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._suffer("delete")
        await self.inner.delete(keys)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self._suffer("touch")
        await self.inner.touch(keys)

    async def scan(self) -> AsyncIterator[Entry]:
        await self._suffer("scan")
        async for entry in self.inner.scan():
            yield entry

    async def usage(self) -> Usage:
        await self._suffer("usage")
        return await self.inner.usage()

    async def close(self) -> None:
        await self.inner.close()

    async def _suffer(self, operation: str) -> Fault | None:
        """Let happen what comes before the call; what is left to do to its chunks."""
        clock = self.context.clock
        fault = self.plan.next_fault(operation)
        kind = fault.kind if fault is not None else None
        if fault is not None and kind is FaultKind.DISCONNECT:
            self._unreachable_until_s = clock.now_s() + fault.delay_s
        if clock.now_s() < self._unreachable_until_s:
            raise TierUnavailableError("disconnected by a fault")
        if fault is None:
            return None
        if kind is FaultKind.ERROR:
            raise fault.error("failed by a fault")
        if kind is FaultKind.HANG:
            await asyncio.Event().wait()
        if kind is FaultKind.DELAY:
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

    def _spoilt(self, transfer: Transfer, kind: FaultKind) -> Transfer:
        """What is stored instead; the buffers that were lent stay as they are."""
        if kind is FaultKind.SHORT:
            kept = len(transfer.payload) // 2 // self.alignment * self.alignment
            return replace(transfer, payload=transfer.payload[:kept])
        # In memory that is aligned as the tier wants it, and as long.
        copy = memoryview(mmap.mmap(-1, len(transfer.payload)))
        copy[:] = transfer.payload
        _flip(copy)
        return replace(transfer, payload=copy)


def faulty(tier_class: type[SecondaryTierManager], plan: FaultPlan) -> type[FaultyTier]:
    """Put faults around a tier.

    Args:
        tier_class: the tier.
        plan: what goes wrong in it.

    Returns:
        A tier class with the same options and abilities, for a thread runner: the plan is not in
        the options, so that a process of its own would not know it.
    """
    return type(
        f"Faulty{tier_class.__name__}",
        (FaultyTier,),
        {
            "inner_class": tier_class,
            "plan": plan,
            "config_model": tier_class.config_model,
            "medium": tier_class.medium,
            "locality": tier_class.locality,
            "capabilities": tier_class.capabilities,
            "alignment": tier_class.alignment,
            "contract_version": tier_class.contract_version,
            "__module__": __name__,
        },
    )


def _flip(payload: memoryview) -> None:
    payload[len(payload) // 2] ^= 1
