"""Seals chunks before a store, and opens sealed chunks after a load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.contract import ChunkCodec
from kvtier_sdk.errors import ChunkAuthError, CorruptChunkError, TierError
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.types import OffloadKey, Transfer

#: The maximum number of foreign chunks (see ChunkSealer) to remember. The oldest are forgotten.
_MAX_FOREIGN = 16_384


class _Foreign(Enum):
    FOUND = auto()
    REPLACED = auto()
    LEFT = auto()


@dataclass(eq=False)
class ChunkSealer:
    """Stores chunks sealed, and opens them after a load.

    A chunk is foreign if it was sealed with a sealing key that this engine lacks. This engine
    replaces a foreign chunk once, because the other sealing key may be retired. If the chunk turns
    foreign again, some engine still uses the other key, and this engine refuses further stores of
    the chunk. Otherwise the two engines would replace each other's chunks forever.
    """

    _call: TierCaller
    _codec: ChunkCodec
    _header: ChunkHeader
    _scratch: BufferArena
    _foreign: dict[OffloadKey, _Foreign] = field(default_factory=dict)

    async def transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> list[TierError | None]:
        """Load or store chunks. If a chunk cannot be opened, its slot's content is undefined."""
        scratch = self._scratch.take(len(batch))
        try:
            sealed = [
                transfer.with_payload(buffer[: len(transfer.payload)])
                for transfer, buffer in zip(batch, scratch, strict=True)
            ]
            if operation is Operation.STORE:
                return await self._store(batch, sealed)
            return await self._load(batch, sealed)
        finally:
            self._scratch.give_back(scratch)

    async def _store(
        self, batch: Sequence[Transfer], sealed: Sequence[Transfer]
    ) -> list[TierError | None]:
        results = [self._refusal(transfer.key) for transfer in batch]
        sent = [index for index, error in enumerate(results) if error is None]
        if not sent:
            return results
        pairs = [(batch[index], sealed[index]) for index in sent]
        await run_blocking(self._seal, pairs)
        stored = await self._call.transfer(Operation.STORE, [into for _, into in pairs])
        for index, error in zip(sent, stored, strict=True):
            results[index] = error
            key = batch[index].key
            if error is None and self._foreign.get(key) is _Foreign.FOUND:
                self._foreign[key] = _Foreign.REPLACED
        return results

    async def _load(
        self, batch: Sequence[Transfer], sealed: Sequence[Transfer]
    ) -> list[TierError | None]:
        results = list(await self._call.transfer(Operation.LOAD, sealed))
        arrived = [index for index, error in enumerate(results) if error is None]
        if not arrived:
            return results
        opened = await run_blocking(
            lambda: [self._open(sealed[index], batch[index]) for index in arrived]
        )
        for index, error in zip(arrived, opened, strict=True):
            results[index] = error
            if isinstance(error, ChunkAuthError) and error.unknown_key:
                key = batch[index].key
                is_new = self._foreign.pop(key, _Foreign.FOUND) is _Foreign.FOUND
                self._foreign[key] = _Foreign.FOUND if is_new else _Foreign.LEFT
                if len(self._foreign) > _MAX_FOREIGN:
                    del self._foreign[next(iter(self._foreign))]
        return results

    def _seal(self, pairs: Sequence[tuple[Transfer, Transfer]]) -> None:
        for transfer, into in pairs:
            self._codec.seal(
                self._header.associated_data(transfer.key, transfer.header),
                transfer.payload,
                into.payload,
                self._header.envelope(transfer.header, self._codec.envelope_bytes),
            )

    def _open(self, sealed: Transfer, into: Transfer) -> CorruptChunkError | None:
        try:
            # Check for damage first, because a damaged chunk may name a wrong sealing key.
            self._header.check(sealed.key, sealed.header, sealed.arrived)
            into.received(len(sealed.header) + len(sealed.arrived))
            self._codec.open(
                self._header.associated_data(sealed.key, sealed.header),
                self._header.envelope(sealed.header, self._codec.envelope_bytes),
                sealed.arrived,
                into.arrived,
            )
        except CorruptChunkError as damage:
            # Drop the traceback, because its frames would keep the buffers alive.
            return damage.with_traceback(None)
        return None

    def _refusal(self, key: OffloadKey) -> TierError | None:
        if self._foreign.get(key) is not _Foreign.LEFT:
            return None
        error = ChunkAuthError("another engine keeps this chunk sealed with another key")
        return error.labelled(self._call.tier.context.name, Operation.STORE.value)
