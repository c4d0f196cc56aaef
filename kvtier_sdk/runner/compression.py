"""Compresses chunks before a store, and expands compressed chunks after a load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.errors import ChunkError, CorruptChunkError, TierError
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.types import Transfer


class ChunkCompressor:
    """A compressor of chunks on their way to a tier. It works in threads, beside the tier's loop.

    A chunk that does not get shorter is stored as it is.
    """

    def __init__(self, planes: Planes, chunk_bytes: int, alignment: int, scratch: BufferArena):
        self._planes = planes
        self._chunk_bytes = chunk_bytes
        self._alignment = alignment
        self._scratch = scratch

    async def store(
        self,
        batch: Sequence[Transfer],
        store: Callable[[Sequence[Transfer]], Awaitable[Sequence[TierError | None]]],
    ) -> Sequence[TierError | None]:
        """Compress chunks and ``store`` them."""
        scratch = self._scratch.take(len(batch))
        try:
            return await store(await run_blocking(self._compress, batch, scratch))
        finally:
            self._scratch.give_back(scratch)

    def _compress(
        self, batch: Sequence[Transfer], scratch: Sequence[memoryview]
    ) -> Sequence[Transfer]:
        return [
            transfer.compressed(buffer[:size_bytes])
            if (size_bytes := self._planes.encode(self._plain(transfer), buffer, self._alignment))
            else transfer
            for transfer, buffer in zip(batch, scratch, strict=True)
        ]

    def _plain(self, transfer: Transfer) -> memoryview:
        return transfer.payload[: self._chunk_bytes]


async def expand(transfers: Sequence[Transfer], chunk_bytes: int) -> list[ChunkError | None]:
    """Expand compressed chunks in place, in a thread."""
    return await run_blocking(lambda: [_expand(transfer, chunk_bytes) for transfer in transfers])


def _expand(transfer: Transfer, chunk_bytes: int) -> ChunkError | None:
    try:
        Planes.decode(transfer.payload, len(transfer.arrived), chunk_bytes)
    except ChunkError as error:
        return error.detached()
    return None
