"""Compresses chunks before a store, and expands compressed chunks after a load."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.codecs.planes import Planes
from kvtier_sdk.contract import TierContext
from kvtier_sdk.errors import ChunkError
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.compression_gate import CompressionGate
from kvtier_sdk.types import Transfer

T = TypeVar("T")


@dataclass(slots=True)
class Moved:
    """The bytes and chunks that the calls of a job have moved so far, as in :class:`JobResult`."""

    object_bytes: int = 0
    compressed_chunks: int = 0
    coding_s: float = 0.0

    def count(self, transfer: Transfer, context: TierContext) -> None:
        stored_bytes = len(transfer.arrived)
        self.object_bytes += context.header_bytes + stored_bytes
        self.compressed_chunks += stored_bytes < context.payload_bytes


@dataclass(eq=False)
class ChunkCompressor:
    """A compressor that works in threads, so that it does not block the tier's loop.

    It compresses if it has a ``coder`` and ``scratch``, with a ``gate`` only while that is open. It
    always expands, because other engines may compress the chunks that they share with this one.
    """

    _chunk_bytes: int
    _alignment: int
    _coder: Planes | None
    _scratch: BufferArena | None
    gate: CompressionGate | None
    _clock: Clock

    @asynccontextmanager
    async def compressing(
        self, batch: Sequence[Transfer], moved: Moved
    ) -> AsyncIterator[Sequence[Transfer]]:
        """Yield transfers that store compressed chunks, or plain ones where that gains nothing."""
        if self._coder is None or self._scratch is None:
            yield batch
            return
        scratch = self._scratch.take(len(batch))
        try:
            if self.gate is not None and self.gate.begin_store():
                plain = batch[0].payload[: self._chunk_bytes]
                work = partial(self.gate.trials.try_out, plain, scratch[0])
                await self._timed(moved, work)
                self.gate.decide()
            if self.gate is None or self.gate.is_open:
                compress = partial(self._compress, self._coder, batch, scratch)
                batch = await self._timed(moved, compress)
            yield batch
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

    async def expand(self, transfers: Sequence[Transfer], moved: Moved) -> list[ChunkError | None]:
        """Expand the compressed ones of loaded and verified chunks in place."""
        # Only a compressed payload is shorter; see ChunkHeader.check.
        if all(len(transfer.arrived) == len(transfer.payload) for transfer in transfers):
            return [None] * len(transfers)
        return await self._timed(moved, lambda: [self._expand(transfer) for transfer in transfers])

    def _expand(self, transfer: Transfer) -> ChunkError | None:
        if len(transfer.arrived) < len(transfer.payload):
            try:
                Planes.decode(transfer.payload, len(transfer.arrived), self._chunk_bytes)
            except ChunkError as fault:
                # Drop the traceback, because its frames would keep the buffers alive.
                return fault.with_traceback(None)
        return None

    async def _timed(self, moved: Moved, work: Callable[[], T]) -> T:
        """Run the work in a thread, and add its duration to what the job ``moved``."""

        def timed() -> tuple[T, float]:
            started_s = self._clock.now_s()
            return work(), self._clock.now_s() - started_s

        result, took_s = await run_blocking(timed)
        moved.coding_s += took_s
        return result
