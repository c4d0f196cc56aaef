"""The file tier. Each call hands its whole batch to one thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, ClassVar

from kvtier_file import compiled
from kvtier_file.config import FileTierConfig
from kvtier_file.file_io import ALIGNMENT
from kvtier_file.maintenance import Maintenance
from kvtier_file.namespace import SHARDS
from kvtier_file.store import ChunkStore
from kvtier_sdk import (
    Capability,
    Entry,
    OffloadKey,
    RequestContext,
    SecondaryTierManager,
    StoredNamespace,
    TierContext,
    TierError,
    Transfer,
    Usage,
    run_blocking,
)

# If the count of the chunks takes longer than this, the tier opens before the count ends.
_COUNT_S = 0.25


class FileTier(SecondaryTierManager):
    """A tier that keeps chunks as files below a directory. The chunks survive a restart.

    Several processes may share a root and its capacity. A killed process damages no chunk.
    """

    config_model = FileTierConfig
    capabilities = (
        Capability.DELETE
        | Capability.TOUCH
        | Capability.SCAN
        | Capability.USAGE
        | Capability.NAMESPACES
    )
    alignment: ClassVar[int] = ALIGNMENT
    # Use few large calls, because the compiled part spreads each call over several threads.
    runner_defaults: ClassVar[Mapping[str, Any]] = {"max_batch": "32MiB", "concurrency": 4}
    contract_version: ClassVar[int] = 1
    config: FileTierConfig

    def __init__(self, config: FileTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._counting: asyncio.Task[None] | None = None
        self._store = (Maintenance if context.maintenance else ChunkStore)(config, context)

    async def open(self) -> None:
        if self.context.maintenance:
            await run_blocking(self._store.open)
            return
        self.config.check_capacity(self.context.object_bytes)
        if compiled.batch_io is None:
            self.context.logger.info(
                "the file tier's compiled part is not installed; a chunk takes up to twice the "
                "processor time"
            )
        await run_blocking(self._store.open)
        clock = self.context.clock
        self._counting = clock.spawn(run_blocking(self._store.count), name="count the chunks")
        try:
            async with clock.timeout(_COUNT_S):
                await asyncio.shield(self._counting)
        except TimeoutError:
            self._counting.add_done_callback(self._note_count)
        except BaseException:
            await self.close()
            raise

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return await run_blocking(self._store.contains, keys)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await run_blocking(self._store.store, batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await run_blocking(self._store.load, batch)

    async def close(self) -> None:
        counting = self._counting
        if counting is not None:
            counting.remove_done_callback(self._note_count)
        await run_blocking(self._store.close)
        if counting is not None:
            await asyncio.gather(counting, return_exceptions=True)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await run_blocking(self._store.delete, keys)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await run_blocking(self._store.touch, keys)

    async def scan(self) -> AsyncIterator[Entry]:
        for shard in SHARDS:
            for entry in await run_blocking(self._store.list_shard, shard):
                yield entry

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        for namespace in await run_blocking(self._store.namespaces):
            yield namespace

    async def usage(self) -> Usage:
        return await run_blocking(self._store.usage)

    def _note_count(self, counting: asyncio.Task[None]) -> None:
        if not counting.cancelled() and (error := counting.exception()) is not None:
            self.context.logger.warning("its chunks are not counted yet: %s", error)
