"""Compresses chunks before a store, and expands compressed chunks after a load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.chunk_header import ChunkHeader
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.errors import CorruptChunkError
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.types import Transfer


class ChunkCompressor:
    """A compressor that works in threads, so that it does not block the tier's loop.

    It compresses if it has ``planes`` and ``scratch``, and always expands, because other engines
    may compress the chunks that they share with this one.
    """

    def __init__(
        self,
        chunk_bytes: int,
        alignment: int,
        planes: Planes | None,
        scratch: BufferArena | None,
        clock: Clock,
    ) -> None:
        self._chunk_bytes = chunk_bytes
        self._alignment = alignment
        self._planes = planes
        self._scratch = scratch
        self._clock = clock

    @asynccontextmanager
    async def compressing(
        self, batch: Sequence[Transfer]
    ) -> AsyncIterator[tuple[Sequence[Transfer], float]]:
        """Yield transfers that store compressed chunks, and the seconds that compressing took.

        A chunk is stored plain where compressing gains nothing.
        """
        if self._planes is None or self._scratch is None:
            yield batch, 0.0
            return
        scratch = self._scratch.take(len(batch))
        try:
            yield await run_blocking(self._compress, self._planes, batch, scratch)
        finally:
            self._scratch.give_back(scratch)

    def _compress(
        self, planes: Planes, batch: Sequence[Transfer], scratch: Sequence[memoryview]
    ) -> tuple[list[Transfer], float]:
        started_s = self._clock.now_s()
        sent = []
        for transfer, buffer in zip(batch, scratch, strict=True):
            plain = transfer.payload[: self._chunk_bytes]
            size_bytes = planes.encode(plain, buffer, self._alignment)
            sent.append(transfer.compressed(buffer[:size_bytes]) if size_bytes else transfer)
        return sent, self._clock.now_s() - started_s

    async def expand(
        self, transfers: Sequence[Transfer]
    ) -> tuple[list[CorruptChunkError | None], float]:
        """Expand loaded and verified chunks in place; return errors, and the seconds it took."""
        if not any(ChunkHeader.is_compressed(transfer.header) for transfer in transfers):
            return [None] * len(transfers), 0.0
        return await run_blocking(self._expand_all, transfers)

    def _expand_all(
        self, transfers: Sequence[Transfer]
    ) -> tuple[list[CorruptChunkError | None], float]:
        started_s = self._clock.now_s()
        errors = [self._expand(transfer) for transfer in transfers]
        return errors, self._clock.now_s() - started_s

    def _expand(self, transfer: Transfer) -> CorruptChunkError | None:
        if ChunkHeader.is_compressed(transfer.header):
            try:
                Planes.decode(transfer.payload, len(transfer.arrived), self._chunk_bytes)
            except CorruptChunkError as damage:
                # Drop the traceback, because its frames would keep the buffers alive.
                return damage.with_traceback(None)
        return None
