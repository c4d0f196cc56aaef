"""Moves chunks between slots and a tier: lends and fills headers, verifies payloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.contract import TierContext
from kvtier_sdk.errors import ChunkAuthError, CorruptChunkError, TierError
from kvtier_sdk.runner.base import SlotMemory
from kvtier_sdk.runner.buffers import BufferPool
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.runner.sealing import ChunkSealer
from kvtier_sdk.types import Transfer

#: Headers are small: many share a mapping.
_HEADERS_PER_MAPPING = 64


class ChunkMover:
    """Moves batches of chunks. Only the headers' memory outlives a batch.

    Args:
        call: the tier.
        context: the tier's.
        header: seals and checks.
        memory: the slots.
        alignment: the tier's.
        can_delete: true if the tier can delete.
        sealer: stands before a tier that has a codec.
    """

    def __init__(
        self,
        call: TierCaller,
        context: TierContext,
        header: ChunkHeader,
        memory: SlotMemory,
        *,
        alignment: int,
        can_delete: bool,
        sealer: ChunkSealer | None = None,
    ) -> None:
        self._call = call
        self._context = context
        self._header = header
        self._memory = memory
        self._alignment = alignment
        self._can_delete = can_delete
        self._sealer = sealer
        self._headers = BufferPool(context.header_bytes, _HEADERS_PER_MAPPING)
        # The names under which the pool notes views of slots.
        self._holders = {
            operation: f"{context.name} {operation.value}"
            for operation in (Operation.LOAD, Operation.STORE)
        }

    @contextmanager
    def transfers(self, job: Job, batch: Sequence[int]) -> Iterator[dict[int, Transfer]]:
        """Lend the buffers of a batch, sealed where it is a store.

        Args:
            job: a load or a store.
            batch: indices into its keys.

        Yields:
            Index to transfer. The headers are taken back at the end: nothing may touch them then.
        """
        headers = self._headers.take(len(batch))
        holder = self._holders[job.operation]
        try:
            lent = {
                index: Transfer(
                    job.keys[index],
                    job.request,
                    header,
                    self._memory.padded_view(job.slots[index], self._alignment, holder),
                )
                for index, header in zip(batch, headers, strict=True)
            }
            if job.operation is Operation.STORE:
                for transfer in lent.values():
                    self._header.seal(transfer.key, transfer.header, transfer.payload)
            yield lent
        finally:
            self._headers.give_back(headers)

    async def move(
        self, operation: Operation, transfers: dict[int, Transfer]
    ) -> dict[int, TierError | None]:
        """Call the tier once and verify what arrived; a damaged chunk is deleted there.

        Args:
            operation: load or store.
            transfers: the batch, or the rest of it.

        Returns:
            A verdict for each.
        """
        tier = self._sealer or self._call
        results = await tier.transfer(operation, list(transfers.values()))
        errors = dict(zip(transfers, results, strict=True))
        if operation is Operation.STORE:
            return errors
        if self._sealer is None:  # which has checked them, sealed as they were
            for index, error in errors.items():
                if error is None:
                    errors[index] = self._damage(transfers[index])
        await self._delete(
            transfers[index] for index, error in errors.items() if _is_useless(error)
        )
        return errors

    def _damage(self, loaded: Transfer) -> CorruptChunkError | None:
        try:
            self._header.check(loaded.key, loaded.header, loaded.payload)
        except CorruptChunkError as damage:
            damage.tier, damage.operation = self._context.name, Operation.LOAD.value
            return damage
        return None

    async def _delete(self, damaged: Iterable[Transfer]) -> None:
        keys = [transfer.key for transfer in damaged]
        if keys and self._can_delete:
            try:
                await self._call.delete(keys)
            except TierError as error:
                self._context.logger.warning("%s", error)


def _is_useless(error: TierError | None) -> bool:
    """Return true if no engine can use the chunk."""
    if isinstance(error, ChunkAuthError) and error.unknown_key:
        return False
    return isinstance(error, CorruptChunkError)
