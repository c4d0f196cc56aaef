"""A memory tier behind a :class:`ChunkSealer`, as one tier that the conformance kit can check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvtier_sdk import (
    Capability,
    Medium,
    MemoryTier,
    MemoryTierConfig,
    OffloadKey,
    Operation,
    RequestContext,
    SecondaryTierManager,
    TierConfig,
    TierContext,
    TierError,
    Transfer,
    load_codec,
)
from kvtier_sdk.chunk_header import ChunkHeader, header_bytes
from kvtier_sdk.options.secrets import Secrets
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.sealing import ChunkSealer

#: The scratch memory's capacity in chunks, which is more than the kit moves at once.
_MAX_CHUNKS = 1024


class SealedTierConfig(MemoryTierConfig):
    cipher: str


class SealedTier(SecondaryTierManager):
    """A tier that seals each transfer's header and payload as one payload of an inner tier."""

    config_model: ClassVar[type[TierConfig]] = SealedTierConfig
    medium = Medium.CPU
    capabilities = Capability.DELETE | Capability.TOUCH
    contract_version = 1
    config: Any

    def __init__(self, config: SealedTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        codec = load_codec(config.cipher)
        slot_bytes = context.object_bytes
        scratch = BufferArena(slot_bytes, _MAX_CHUNKS)
        inner = replace(
            context,
            chunk_bytes=slot_bytes,
            header_bytes=header_bytes(1, codec.envelope_bytes),
            payload_bytes=slot_bytes,
            regions=(*context.regions, scratch.region),
        )
        self._inner = MemoryTier(config, inner)
        self._header = ChunkHeader(context.namespace.fingerprint, slot_bytes, sealed=True)
        log = TierLog(context.name, context.clock)
        caller = TierCaller(lambda: self._inner, Secrets(), log)
        self._sealer = ChunkSealer(caller, codec, self._header, scratch)

    async def open(self) -> None:
        await self._inner.open()

    async def close(self) -> None:
        await self._inner.close()

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        return await self._inner.lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        slots = [self._slot(transfer) for transfer in batch]
        for transfer, slot in zip(batch, slots, strict=True):
            slot.payload[:] = b"".join(transfer.buffers)
            self._header.seal(slot.key, slot.header, slot.payload)
        return await self._sealer.transfer(Operation.STORE, slots) if slots else []

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        slots = [self._slot(transfer) for transfer in batch]
        results = await self._sealer.transfer(Operation.LOAD, slots) if slots else []
        for transfer, slot, error in zip(batch, slots, results, strict=True):
            if error is None:
                transfer.fill(slot.arrived)
        return results

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._inner.delete(keys)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self._inner.touch(keys)

    def _slot(self, transfer: Transfer) -> Transfer:
        header = bytearray(self._inner.context.header_bytes)
        payload = bytearray(transfer.object_bytes)
        return Transfer(
            transfer.key,
            transfer.request,
            memoryview(header),
            memoryview(payload),
            replace=transfer.replace,
        )
