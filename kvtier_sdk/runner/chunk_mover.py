"""Moves chunks with their headers between slots and a tier, and verifies loaded payloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.errors import ChunkAuthError, ChunkNotFoundError, CorruptChunkError, TierError
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.compression import ChunkCompressor
from kvtier_sdk.runner.jobs import Job, JobResult, Operation
from kvtier_sdk.runner.sealing import ChunkSealer
from kvtier_sdk.types import OffloadKey, Transfer

#: The maximum number of failed loads to remember. A forgotten load simply fails again.
_MAX_UNLOADED = 65_536


@dataclass(eq=False)
class ChunkMover:
    """Moves batches of chunks between the host pool and a tier.

    A tier may skip the store of a chunk that it already has, so a broken chunk would stay broken.
    Therefore the store after a failed load sets :attr:`Transfer.replace`. If the SDK may delete
    chunks, a chunk that no engine can use is also deleted.
    """

    _call: TierCaller
    _header: ChunkHeader
    _memory: PoolMemory
    _headers: BufferArena
    _sealer: ChunkSealer | None
    _compressor: ChunkCompressor
    # The chunks whose last load failed or still runs, oldest first.
    _unloaded: dict[OffloadKey, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._context = self._call.tier.context
        self._alignment = self._call.tier.alignment

    @contextmanager
    def transfers(self, job: Job, batch: Sequence[int]) -> Iterator[dict[int, Transfer]]:
        """Yield the transfers by index in the job. A store's header is written when first read."""
        headers = self._headers.take(len(batch))
        is_store = job.operation is Operation.STORE
        try:
            yield {
                index: Transfer(
                    job.keys[index],
                    job.request,
                    header,
                    self._memory.padded_view(job.slots[index], self._alignment),
                    replace=is_store and job.keys[index] in self._unloaded,
                    unsealed=self._header.seal if is_store else None,
                )
                for index, header in zip(batch, headers, strict=True)
            }
        finally:
            self._headers.give_back(headers)

    async def call(
        self, operation: Operation, transfers: dict[int, Transfer], result: JobResult
    ) -> dict[int, TierError | None]:
        """Call the tier; return each transfer's error. The caller must :meth:`verify` loads."""
        tier = self._compressor.gate or self._sealer or self._call
        batch = list(transfers.values())
        if operation is Operation.LOAD:
            for transfer in batch:
                transfer.unverified = self._header.check
                # Record loads before the call, because they may never end.
                self._unloaded.pop(transfer.key, None)
                self._unloaded[transfer.key] = None
            while len(self._unloaded) > _MAX_UNLOADED:
                del self._unloaded[next(iter(self._unloaded))]
            return dict(zip(transfers, await tier.transfer(operation, batch), strict=True))
        async with self._compressor.compressing(batch, result) as sent:
            errors = dict(zip(transfers, await tier.transfer(operation, sent), strict=True))
            for transfer, error in zip(sent, errors.values(), strict=True):
                if error is None:
                    self._moved(transfer, result)
        return errors

    async def verify(
        self, transfers: dict[int, Transfer], errors: dict[int, TierError | None], result: JobResult
    ) -> None:
        """Verify and expand loaded chunks; add errors to ``errors``, and delete damaged chunks."""
        if self._sealer is None:  # otherwise the sealer has checked the chunks
            for index, error in errors.items():
                if error is None:
                    try:
                        transfers[index].verify()
                    except CorruptChunkError as damage:
                        errors[index] = damage
        intact = [index for index, error in errors.items() if error is None]
        expanded = await self._compressor.expand([transfers[index] for index in intact], result)
        errors.update(zip(intact, expanded, strict=True))
        useless = []
        for index, error in errors.items():
            transfer = transfers[index]
            if error is None:
                self._moved(transfer, result)
                continue
            error.labelled(self._context.name, Operation.LOAD.value)
            is_foreign = isinstance(error, ChunkAuthError) and error.unknown_key
            if isinstance(error, ChunkNotFoundError):
                self._unloaded.pop(transfer.key, None)
            elif isinstance(error, CorruptChunkError) and not is_foreign:
                useless.append(transfer.key)
        if useless and self._call.can_delete:
            try:
                await self._call.delete(useless)
            except TierError as error:
                self._context.logger.warning("%s", error)

    def _moved(self, transfer: Transfer, result: JobResult) -> None:
        self._unloaded.pop(transfer.key, None)
        stored_bytes = len(transfer.arrived)
        result.object_bytes += self._context.header_bytes + stored_bytes
        result.compressed_chunks += stored_bytes < self._context.payload_bytes
