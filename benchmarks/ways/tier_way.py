"""kvtier's own way: a tier, called as its runner calls it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence

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
    """A tier of any backend, given a few batches at a time.

    Args:
        work: the chunks to move.
        options: the tier's entry.
        key_start: prefix of its keys, for a store that others use at the same time.
        may_evict: allow chunks to be evicted again, or to find no room.
        keep: leave the chunks in the tier.
    """

    name = "kvtier"
    namespace = Namespace({"bench": 1})
    _tier: SecondaryTierManager

    def __init__(
        self,
        work: Work,
        *,
        key_start: bytes = b"",
        may_evict: bool = False,
        keep: bool = False,
        **options: object,
    ) -> None:
        super().__init__(work)
        self._options = options
        self._key_start = key_start
        self._may_evict = may_evict
        self._keep = keep

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
            report_removed=lambda keys, *, evicted=False: None,
            regions=tuple(self.work.regions),
        )
        self._tier = spec.tier_class(spec.config, context)
        await self._tier.open()

    async def close(self) -> None:
        # Deleted by the tier itself, so that its directories and such serve the next round too.
        for keys in () if self._keep else self._batches():
            await self._tier.delete(keys)
        await self._tier.close()

    async def store(self) -> None:
        await self._move(self._tier.store)

    async def load(self) -> None:
        await self._move(self._tier.load)

    def _batches(self) -> Iterator[list[bytes]]:
        step = self.work.batch_chunks
        for start in range(0, self.work.chunks, step):
            yield [
                self._key_start + b"%020d" % (index % self.work.keys)
                for index in range(start, min(start + step, self.work.chunks))
            ]

    async def _move(
        self, call: Callable[[Sequence[Transfer]], Awaitable[Sequence[object]]]
    ) -> None:
        batches = self._batches()

        async def lane(slots: list[list[memoryview]]) -> None:
            for keys in batches:
                verdicts = await call(
                    [
                        Transfer(key, _REQUEST, header, payload)
                        for key, (header, payload) in zip(keys, slots, strict=False)
                    ]
                )
                if any(verdicts) and not self._may_evict:
                    raise SystemExit(f"failed: {verdicts}")

        await asyncio.gather(*map(lane, self.work.lanes()))
