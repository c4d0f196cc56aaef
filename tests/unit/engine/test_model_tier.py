from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import closing

from support.runners import CHUNK_BYTES, KEYS

from kvtier_sdk import (
    Capability,
    HostPool,
    Namespace,
    OffloadKey,
    Operation,
    PoolLayout,
    RequestContext,
    SystemClock,
    TierSpec,
)
from kvtier_sdk.engine import ModelTier, Work
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.tiers.memory import MemoryTier, MemoryTierConfig

PATIENCE_S = 30.0
touches: queue.Queue[Sequence[OffloadKey]] = queue.Queue()


class FindingTier(MemoryTier):
    """Finds every chunk. Reports no usage, because a report would wake the model's thread."""

    capabilities = Capability.TOUCH

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return [True] * len(keys)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        touches.put(keys)


def test_found_chunks_are_touched_before_the_engine_has_more_work() -> None:
    spec = TierSpec("t", "memory", FindingTier, MemoryTierConfig(), RunnerOptions())
    with closing(HostPool.create(PoolLayout(8, CHUNK_BYTES))) as pool:
        tier = ModelTier(
            spec,
            pool,
            Namespace({"model": "m"}),
            engine="an engine",
            clock=SystemClock(),
            shutdown_timeout_s=PATIENCE_S,
        )
        try:
            tier.submit(Work(Operation.LOOKUP, RequestContext("r"), lambda *_: None, KEYS))
            assert touches.get(timeout=PATIENCE_S) == KEYS
        finally:
            tier.close()
            tier.join()
