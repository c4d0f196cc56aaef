"""Stores chunks' notes in the tier itself, in segments: objects with the notes of many chunks."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, islice, takewhile

import msgspec

from kvtier_sdk.errors import TierError
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.chunk_mover import ChunkMover
from kvtier_sdk.runner.jobs import Job, JobResult, Operation
from kvtier_sdk.types import Capability, OffloadKey, RequestContext, make_offload_key

#: The KV-cache group of segments' keys. No model has so many groups.
SEGMENT_GROUP = 0xFFFF_FFFE

#: The beginning of a segment: the length in bytes of the encoded notes that follow.
_LENGTH = struct.Struct("<Q")
#: Bytes that MessagePack adds to each key and its note.
_RECORD_BYTES = 8
_KEEPER = RequestContext("kvtier notes")
#: Time limit for one segment's store or load.
_DEADLINE_S = 30.0

_records = msgspec.msgpack.Decoder(dict[bytes, bytes])


@dataclass(eq=False)
class NoteSegments:
    """The segments in a tier, which are stored, sealed and found like chunks.

    Engines read a segment only once or twice, so segments never change. A new segment, with a new
    name, replaces a partly filled one. Of all segments with a chunk's note, engines keep the newest
    while the store has the chunk. Names begin with the time, so all engines keep the same segment.
    """

    _call: TierCaller
    _mover: ChunkMover
    _memory: HostPool  # one slot, for the segment that is being stored or loaded
    _rng: random.Random
    # Notes that are not in a full segment yet. A dictionary's methods are thread-safe.
    _pending: dict[OffloadKey, bytes] = field(default_factory=dict)
    _has_news: bool = False
    # The chunks of each known segment; ``None`` for an unreadable segment.
    _chunks: dict[OffloadKey, Sequence[OffloadKey] | None] = field(default_factory=dict)
    # Segments to read again. Another engine may have written their missing chunks during the scan.
    _again: set[OffloadKey] = field(default_factory=set)
    _part: OffloadKey | None = None

    def __post_init__(self) -> None:
        self._room_bytes = self._memory.chunk_bytes - _LENGTH.size - _RECORD_BYTES

    def add(self, notes: Mapping[OffloadKey, bytes]) -> None:
        """Queue stored chunks' notes for the next segment, from which other engines read them."""
        fitting = {k: n for k, n in notes.items() if n and _size(k, n) <= self._room_bytes}
        self._pending.update(fitting)
        self._has_news |= bool(fitting)

    def drop(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the notes of removed chunks. Any thread may call this."""
        for key in keys:
            self._pending.pop(key, None)

    async def read(
        self, segments: Set[OffloadKey], take: Callable[[Mapping[OffloadKey, bytes]], bool]
    ) -> None:
        """Pass new segments' notes to ``take``; if it returns false, the next call retries once."""
        self._chunks = {key: of for key, of in self._chunks.items() if key in segments}
        self._again &= segments
        for segment in sorted((segments - self._chunks.keys()) | self._again):
            notes = await self._load(segment)
            is_whole = notes is not None and take(notes)
            retry = self._again.discard if is_whole or segment in self._chunks else self._again.add
            retry(segment)
            self._chunks[segment] = None if notes is None else list(notes)

    async def save(self) -> None:
        while self._has_news:
            pending = self._pending.copy()
            sizes_bytes = accumulate(_size(key, note) for key, note in pending.items())
            fitting = sum(1 for _ in takewhile(self._room_bytes.__ge__, sizes_bytes))
            notes = dict(islice(pending.items(), fitting))
            is_full = len(notes) < len(pending)
            self._has_news = is_full
            if not notes:
                return
            written_us = int(self._call.clock.wall_s() * 1e6)
            name = written_us.to_bytes(8, "big") + self._rng.randbytes(24)
            segment = make_offload_key(name, SEGMENT_GROUP)
            try:
                await self._store(segment, notes)
            except BaseException:
                self._has_news = True
                raise
            self._chunks[segment] = list(notes)
            part, self._part = self._part, None if is_full else segment
            if is_full:
                self.drop(notes)
            await self._delete([] if part is None else [part])

    async def tidy(self, known: Container[OffloadKey]) -> None:
        """Delete replaced segments; touch the other segments, so that the tier keeps them."""
        kept: list[OffloadKey] = []
        useless: list[OffloadKey] = []
        covered: set[OffloadKey] = set()
        for segment in sorted(self._chunks, reverse=True):
            keys = self._chunks[segment]
            needed = [key for key in keys or () if key in known and key not in covered]
            covered.update(needed)
            is_kept = keys is None or segment in self._again or bool(needed)
            (kept if is_kept else useless).append(segment)
            await self._call.clock.sleep(0)
        await self._delete(useless)
        if kept and Capability.TOUCH in self._call.tier.capabilities:
            most = self._call.tier.max_batch_keys or len(kept)
            for start in range(0, len(kept), most):
                await self._call.touch(kept[start : start + most])

    async def _delete(self, segments: list[OffloadKey]) -> None:
        if self._call.can_delete:
            for segment in segments:
                await self._call.delete([segment])
                self._chunks.pop(segment, None)

    async def _store(self, segment: OffloadKey, notes: Mapping[OffloadKey, bytes]) -> None:
        body = msgspec.msgpack.encode(notes)
        payload = self._memory.view(0)
        payload[:] = (_LENGTH.pack(len(body)) + body).ljust(len(payload), b"\0")
        if (error := await self._move(Operation.STORE, segment)) is not None:
            raise error

    async def _load(self, segment: OffloadKey) -> dict[OffloadKey, bytes] | None:
        try:
            if (error := await self._move(Operation.LOAD, segment)) is not None:
                raise error
            payload = self._memory.view(0)
            (length,) = _LENGTH.unpack_from(payload)
            return _records.decode(payload[_LENGTH.size : _LENGTH.size + length])
        except (TierError, msgspec.DecodeError) as error:
            self._call.log.debug("a segment of notes cannot be read: %s", error)
            return None

    async def _move(self, operation: Operation, segment: OffloadKey) -> TierError | None:
        job = Job(0, operation, [segment], [0], _KEEPER, 0.0)
        result = JobResult(job.job_id, [])
        async with self._call.clock.timeout(_DEADLINE_S):
            with self._mover.transfers(job, [0]) as transfers:
                errors = await self._mover.call(operation, transfers, result)
                if operation is Operation.LOAD:
                    await self._mover.verify(transfers, errors, result)
        return errors[0]


def _size(key: OffloadKey, note: bytes) -> int:
    return len(key) + len(note) + _RECORD_BYTES
