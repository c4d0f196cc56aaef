"""Calls a tier directly, as a runner does."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from kvtier_sdk import (
    Namespace,
    RequestContext,
    SecondaryTierManager,
    SystemClock,
    TierContext,
    TierSpec,
    Transfer,
)
from ways.way import Way, Work

_REQUEST = RequestContext("bench")


class TierWay(Way):
    namespace = Namespace({"bench": 1})
    _tier: SecondaryTierManager

    def __init__(
        self, work: Work, *, key_start: bytes = b"", may_evict: bool = False, **options: object
    ) -> None:
        super().__init__(work)
        self._options = options
        self._key_start = key_start
        self._may_evict = may_evict

    async def open(self) -> None:
        spec = TierSpec.from_options(self._options)
        context = TierContext(
            name=spec.name,
            namespace=self.namespace,
            chunk_bytes=self.work.chunk_bytes,
            header_bytes=self.work.header_bytes,
            payload_bytes=self.work.chunk_bytes,
            clock=SystemClock(),
            logger=logging.getLogger("bench"),
            report_removed=lambda keys, **why: None,
            regions=tuple(self.work.regions),
        )
        self._tier = spec.tier_class(spec.config, context)
        await self._tier.open()

    async def close(self) -> None:
        # Delete the chunks through the tier, which keeps its directories for the next round.
        for numbers in self.work.batches():
            await self._tier.delete(list(map(self._key, numbers)))
        await self._tier.close()

    async def store(self) -> None:
        await self._move(self._tier.store)

    async def load(self) -> None:
        await self._move(self._tier.load)

    def _key(self, number: int) -> bytes:
        return self._key_start + b"%020d" % (number % self.work.keys)

    async def _move(
        self, call: Callable[[Sequence[Transfer]], Awaitable[Sequence[object]]]
    ) -> None:
        async def move(numbers: range) -> None:
            slots = self.work.slots
            verdicts = await call([Transfer(self._key(n), _REQUEST, *slots[n]) for n in numbers])
            if any(verdicts) and not self._may_evict:
                raise SystemExit(f"failed: {verdicts}")

        await self.work.each(move, self.work.batches())
