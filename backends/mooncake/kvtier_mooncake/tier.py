"""The Mooncake tier, which moves chunks directly between host memory and a store's nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtier_mooncake.client import connect, make_client, reach_master
from kvtier_mooncake.config import MooncakeTierConfig
from kvtier_mooncake.statuses import MASTER_LOST, NOT_FOUND, TOO_LONG, TRANSFER_FAILED, error_of
from kvtier_sdk import (
    Capability,
    ChunkError,
    CorruptChunkError,
    Locality,
    OffloadKey,
    RequestContext,
    RunningCalls,
    SecondaryTierManager,
    TierContext,
    TierError,
    Transfer,
    check_any_answered,
    run_blocking,
)

_NOT_THERE = "stored, but absent: evicted at once, or another store of it has not ended"


class MooncakeTier(SecondaryTierManager):
    """A tier that keeps chunks in a Mooncake Store, in the memory of the store's nodes."""

    config_model = MooncakeTierConfig
    locality = Locality.REMOTE
    capabilities = Capability.DELETE
    fixed_length = True  # the client loads an object only into buffers of exactly its length
    needs_process = True  # opening or closing a client holds the interpreter lock for seconds
    contract_version = 1
    config: MooncakeTierConfig

    def __init__(self, config: MooncakeTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._prefix = f"kvtier/{context.namespace.fingerprint}/"
        self._calls = RunningCalls()
        self._client: Any = None
        self._replication: Any = None
        self._is_master_lost = False

    async def open(self) -> None:
        self._client, self._replication = await run_blocking(make_client, self.config)
        await run_blocking(connect, self._client, self.config, self.context.regions)

    async def close(self) -> None:
        await self._calls.close()
        client, self._client = self._client, None
        if client is not None:
            await run_blocking(client.close)

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        found = await self._contains(keys)
        check_any_answered(found)
        return [one is True for one in found]

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        # The store never overwrites an object, so first remove the objects to be replaced.
        await self.delete([transfer.key for transfer in batch if transfer.replace])
        statuses = await self._move("batch_put_from_multi_buffers", batch, self._replication)
        verdicts = [error_of(status) if status else None for status in statuses]
        # A status of 0 does not prove that the object exists: another writer of the key may be
        # unfinished or dead, and a full store may evict an unread object at once.
        stored = [at for at, verdict in enumerate(verdicts) if verdict is None]
        found = await self._contains([batch[at].key for at in stored])
        for at, one in zip(stored, found, strict=True):
            if one is not True:
                verdicts[at] = one or ChunkError(_NOT_THERE, retryable=True)
        return verdicts

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        lengths = await self._move("batch_get_into_multi_buffers", batch)
        verdicts: list[TierError | None] = []
        for transfer, length in zip(batch, lengths, strict=True):
            if length in (TOO_LONG, TRANSFER_FAILED):
                # The object has another length, or its node is dead. The stored length shows which.
                known = await self._call("get_size", self._name(transfer.key))
                length = TRANSFER_FAILED if known == transfer.object_bytes else known
            verdicts.append(_verdict(length, transfer.object_bytes))
        return verdicts

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        # Force the removal, because a lookup protects its object with a lease for some seconds. A
        # concurrent load may then read another object's bytes, but the header's check detects that.
        statuses = await self._ask("batch_remove", keys, True)
        removed = [key for key, status in zip(keys, statuses, strict=True) if status == 0]
        self.context.report_removed(removed)
        for status in statuses:
            if status not in (0, NOT_FOUND):
                raise error_of(status)

    async def _contains(self, keys: Sequence[OffloadKey]) -> list[bool | TierError]:
        statuses = await self._ask("batch_is_exist", keys)
        return [error_of(status) if status < 0 else status == 1 for status in statuses]

    async def _move(self, method: str, batch: Sequence[Transfer], *more: Any) -> Sequence[int]:
        regions = [transfer.regions for transfer in batch]
        return await self._ask(
            method,
            [transfer.key for transfer in batch],
            [[region.address for region in both] for both in regions],
            [[region.size_bytes for region in both] for both in regions],
            *more,
        )

    async def _ask(self, method: str, keys: Sequence[OffloadKey], *more: Any) -> Sequence[int]:
        if not keys:
            return []
        statuses: list[int] = await self._call(method, [self._name(key) for key in keys], *more)
        return statuses

    async def _call(self, method: str, *arguments: Any) -> Any:
        async with self._calls:
            if self._is_master_lost:
                await run_blocking(reach_master, self.config)
            result = await run_blocking(getattr(self._client, method), *arguments)
        self._is_master_lost = MASTER_LOST in (result if isinstance(result, list) else [result])
        return result

    def _name(self, key: OffloadKey) -> str:
        return self._prefix + key.hex()


def _verdict(length: int, object_bytes: int) -> TierError | None:
    """Return a load's error, or ``None``. A negative ``length`` is a status of the client."""
    if length < 0:
        return error_of(length)
    if length != object_bytes:
        return CorruptChunkError(f"{length} bytes stored; expected {object_bytes}")
    return None
