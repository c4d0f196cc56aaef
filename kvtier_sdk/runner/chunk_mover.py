"""Moves chunks between slots and a tier: lends and fills headers, verifies payloads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.errors import (
    ChunkAuthError,
    ChunkNotFoundError,
    CorruptChunkError,
    TierError,
)
from kvtier_sdk.runner.base import SlotMemory
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.runner.sealing import ChunkSealer
from kvtier_sdk.types import OffloadKey, Transfer

#: How many failed chunks are remembered. Forgetting one is harmless: it fails again, and is
#: remembered again.
_MAX_UNLOADED = 65_536


class ChunkMover:
    """Moves batches of chunks.

    An object that failed to load would fail again, and a tier that still has it may skip the next
    store of its key. So the store after a failed load sets :attr:`Transfer.replace`. An object that
    is certainly damaged is also deleted at once, if the tier can delete.
    """

    def __init__(
        self,
        call: TierCaller,
        header: ChunkHeader,
        memory: SlotMemory,
        headers: BufferArena,
        sealer: ChunkSealer | None,
    ) -> None:
        self._call = call
        self._context = call.tier.context
        self._alignment = call.tier.alignment
        self._header = header
        self._memory = memory
        self._headers = headers
        self._sealer = sealer
        # Chunks whose last load failed or is still under way; oldest first.
        self._unloaded: dict[OffloadKey, None] = {}

    @contextmanager
    def transfers(self, job: Job, batch: Sequence[int]) -> Iterator[dict[int, Transfer]]:
        """Lend the buffers of a batch; for a store, with sealed headers."""
        headers = self._headers.take(len(batch))
        # The name under which the pool logs views of slots that are still in use when it closes.
        holder = f"{self._context.name} {job.operation.value}"
        is_store = job.operation is Operation.STORE
        try:
            lent = {
                index: Transfer(
                    job.keys[index],
                    job.request,
                    header,
                    self._memory.padded_view(job.slots[index], self._alignment, holder),
                    replace=is_store and job.keys[index] in self._unloaded,
                )
                for index, header in zip(batch, headers, strict=True)
            }
            if is_store:
                for transfer in lent.values():
                    self._header.seal(transfer.key, transfer.header, transfer.payload)
            yield lent
        finally:
            self._headers.give_back(headers)

    async def call(
        self, operation: Operation, transfers: dict[int, Transfer]
    ) -> dict[int, TierError | None]:
        """Call the tier once. :meth:`verify` must follow a load."""
        if operation is Operation.LOAD:
            # Do this before the call, because a load may miss its deadline or never end.
            self._doubt(transfers.values())
        tier = self._sealer or self._call
        results = await tier.transfer(operation, list(transfers.values()))
        errors = dict(zip(transfers, results, strict=True))
        if operation is Operation.STORE:
            self._trust(transfers[index] for index, error in errors.items() if error is None)
        return errors

    async def verify(
        self, transfers: dict[int, Transfer], errors: dict[int, TierError | None]
    ) -> None:
        """Give damaged chunks of a load their error, and delete those that no engine can use."""
        if self._sealer is None:  # the sealer has checked the sealed chunks
            for index, error in errors.items():
                if error is None:
                    errors[index] = self._damage(transfers[index])
        self._trust(
            transfers[index]
            for index, error in errors.items()
            if error is None or isinstance(error, ChunkNotFoundError)
        )
        useless = [transfers[index].key for index, error in errors.items() if _is_useless(error)]
        if useless and self._call.can_delete:
            try:
                await self._call.delete(useless)
            except TierError as error:
                self._context.logger.warning("%s", error)

    def _doubt(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._unloaded.pop(transfer.key, None)
            self._unloaded[transfer.key] = None
        while len(self._unloaded) > _MAX_UNLOADED:
            del self._unloaded[next(iter(self._unloaded))]

    def _trust(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._unloaded.pop(transfer.key, None)

    def _damage(self, loaded: Transfer) -> CorruptChunkError | None:
        try:
            self._header.check(loaded.key, loaded.header, loaded.payload)
        except CorruptChunkError as damage:
            damage.tier, damage.operation = self._context.name, Operation.LOAD.value
            return damage
        return None


def _is_useless(error: TierError | None) -> bool:
    """Return true if no engine can use the chunk."""
    if isinstance(error, ChunkAuthError) and error.unknown_key:
        return False
    return isinstance(error, CorruptChunkError)
