"""Compresses chunks before a store, and expands compressed chunks after a load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.errors import CorruptChunkError
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.types import Transfer


class ChunkCompressor:
    """A compressor that works in threads, so that it does not block the tier's loop.

    It compresses if it has a ``coder`` and ``scratch``, and always expands, because other engines
    may compress the chunks that they share with this one.
    """

    def __init__(
        self, chunk_bytes: int, alignment: int, coder: Planes | None, scratch: BufferArena | None
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._alignment = alignment
        self._coder = coder
        self._scratch = scratch

    @asynccontextmanager
    async def compressing(self, batch: Sequence[Transfer]) -> AsyncIterator[Sequence[Transfer]]:
        """Yield transfers that store compressed chunks, or plain ones where that gains nothing."""
        if self._coder is None or self._scratch is None:
            yield batch
            return
        scratch = self._scratch.take(len(batch))
        try:
            yield await run_blocking(self._compress, self._coder, batch, scratch)
        finally:
            self._scratch.give_back(scratch)

    def _compress(
        self, coder: Planes, batch: Sequence[Transfer], scratch: Sequence[memoryview]
    ) -> list[Transfer]:
        sent = []
        for transfer, buffer in zip(batch, scratch, strict=True):
            plain = transfer.payload[: self._chunk_bytes]
            size_bytes = coder.encode(plain, buffer, self._alignment)
            sent.append(transfer.compressed(buffer[:size_bytes]) if size_bytes else transfer)
        return sent

    async def expand(self, transfers: Sequence[Transfer]) -> list[CorruptChunkError | None]:
        """Expand the compressed ones of loaded and verified chunks in place."""
        if not any(ChunkHeader.is_compressed(transfer.header) for transfer in transfers):
            return [None] * len(transfers)
        return await run_blocking(lambda: [self._expand(transfer) for transfer in transfers])

    def _expand(self, transfer: Transfer) -> CorruptChunkError | None:
        if ChunkHeader.is_compressed(transfer.header):
            try:
                Planes.decode(transfer.payload, len(transfer.arrived), self._chunk_bytes)
            except CorruptChunkError as damage:
                # Drop the traceback, because its frames would keep the buffers alive.
                return damage.with_traceback(None)
        return None
