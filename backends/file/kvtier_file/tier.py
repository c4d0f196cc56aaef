"""The file tier. Each call hands its whole batch to one thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

from kvtier_file.config import FileTierConfig
from kvtier_file.maintenance import Maintenance
from kvtier_file.namespace import SHARDS
from kvtier_file.store import ChunkStore
from kvtier_sdk import (
    Capability,
    Entry,
    Medium,
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


class FileTier(SecondaryTierManager):
    """Stores chunks as files below a directory, within a capacity; they survive a restart.

    Several processes may use a root and share its capacity. Any of them may be killed at any
    moment.
    """

    config_model = FileTierConfig
    medium = Medium.STORAGE
    capabilities = (
        Capability.DELETE
        | Capability.TOUCH
        | Capability.SCAN
        | Capability.USAGE
        | Capability.NAMESPACES
    )
    alignment: ClassVar[int] = 4096
    contract_version: ClassVar[int] = 1
    config: FileTierConfig

    def __init__(self, config: FileTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._store = (Maintenance if context.maintenance else ChunkStore)(config, context)

    async def open(self) -> None:
        if not self.context.maintenance:
            self.config.check_capacity(self.context.object_bytes)
        await run_blocking(self._store.open)

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return await run_blocking(self._store.contains, keys)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await run_blocking(self._store.store, batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return await run_blocking(self._store.load, batch)

    async def close(self) -> None:
        await run_blocking(self._store.close)

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
