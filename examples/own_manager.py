"""An engine that manages its slots itself and offloads chunks to a single tier.

    python examples/own_manager.py file:///tmp/kvtier-own-manager

Each chunk is written to a slot, stored in the tier, evicted from the slot, and loaded again. If the
tier dies, the engine has fewer hits, but every wait has a deadline and no byte is wrong.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from kvtier_sdk import (
    HostPool,
    Job,
    Namespace,
    OffloadKey,
    Operation,
    PoolLayout,
    RequestContext,
    Verdict,
    make_offload_key,
)
from kvtier_sdk.engine import TierClient, TierListener, open_tier

CHUNK_BYTES = 64 * 1024
SLOTS = 16


class SlotTable(TierListener):
    """The chunks in slots, the free slots, and the busy slots, which the tier may read or write."""

    def __init__(self) -> None:
        self.chunks: dict[OffloadKey, int] = {}
        self.free = list(range(SLOTS))
        self.busy: set[int] = set()
        self.present: dict[OffloadKey, bool] = {}

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self.present |= {k: v is Verdict.OK for k, v in zip(job.keys, verdicts, strict=True)}

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        for key, slot, verdict in zip(job.keys, job.slots, verdicts, strict=True):
            if verdict is Verdict.OK:  # the bytes are verified
                self.chunks[key] = slot

    def released(self, tier: TierClient, job: Job) -> None:
        self.busy.difference_update(job.slots)
        if job.operation is Operation.LOAD:  # after a failed load, the slot is free only now
            self.free += set(job.slots) - set(self.chunks.values())


class Engine:
    """A minimal engine. Call its methods from a single thread."""

    def __init__(self, tier: TierClient, pool: HostPool, table: SlotTable) -> None:
        self.tier, self.pool, self.table = tier, pool, table

    def write(self, key: OffloadKey, content: bytes, request: RequestContext) -> None:
        """Write a chunk to a free slot, and offer the chunk to the tier."""
        slot = self.table.chunks[key] = self.table.free.pop()
        self.pool.view(slot)[:] = content
        if self.tier.store([key], [slot], request):  # None if the queue is full or the tier is down
            self.table.busy.add(slot)

    def evict(self, key: OffloadKey) -> None:
        """Free a chunk's slot. The tier must not be reading the slot."""
        slot = self.table.chunks[key]
        assert slot not in self.table.busy
        del self.table.chunks[key]
        self.table.free.append(slot)

    def fetch(self, keys: Sequence[OffloadKey], request: RequestContext) -> list[OffloadKey]:
        """Load chunks, and return the loaded keys. An engine would recompute the missing chunks."""
        lookup = self.tier.lookup(keys, request)
        self.step_until(lambda: lookup.result is not None)
        found = [key for key in keys if self.table.present[key]]
        slots = [self.table.free.pop() for _ in found]
        load = self.tier.load(found, slots, request) if found else None
        taken = 0 if load is None else len(load.keys)
        self.table.free += slots[taken:]
        self.table.busy.update(slots[:taken])
        self.step_until(lambda: load is None or load.result is not None)
        return [key for key in keys if key in self.table.chunks]

    def step_until(self, done: Callable[[], bool]) -> None:
        """Repeat steps until ``done``. Every wait ends, because each job has a deadline."""
        while True:
            self.tier.flush()
            self.tier.poll()
            if done():
                return
            time.sleep(0.0005)  # a model's step


def main(url: str) -> None:
    """Store eight chunks, evict them, load them again, and compare the bytes."""
    contents = {make_offload_key(bytes([n]) * 32): bytes([n]) * CHUNK_BYTES for n in range(8)}
    table, request = SlotTable(), RequestContext("r1")
    pool = HostPool.create(PoolLayout(SLOTS, CHUNK_BYTES))
    namespace = Namespace({"model": "example"})
    with open_tier(url, pool, namespace, table) as tier:
        engine = Engine(tier, pool, table)
        for key, content in contents.items():
            engine.write(key, content, request)
        engine.step_until(lambda: not table.busy)
        for key in contents:
            engine.evict(key)
        readable = engine.fetch(list(contents), request)
        equal = sum(pool.view(table.chunks[key]) == contents[key] for key in readable)
        print(f"{len(readable)} of {len(contents)} chunks came back, {equal} with equal bytes")
        print(f"stored {tier.stats.stored_bytes:,} bytes, loaded {tier.stats.loaded_bytes:,}")
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1])
