"""Keeps chunks' notes in the tier itself: a segment is an object with the notes of many chunks."""

from __future__ import annotations

import random
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.buffers import BufferArena
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.chunk_mover import ChunkMover
from kvtier_sdk.runner.compression import Moved
from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.types import Capability, OffloadKey, RequestContext, make_offload_key

#: The KV-cache group of segments' keys. No model has so many groups.
SEGMENT_GROUP = 0xFFFF_FFFE

#: The length of a segment's notes, before the notes.
_LENGTH = struct.Struct("<Q")
#: Bytes that MessagePack takes for a key and its note, beside their own.
_RECORD_BYTES = 8
_KEEPER = RequestContext("kvtier notes")
#: Time limit for one segment's store or load.
_DEADLINE_S = 30.0

_records = msgspec.msgpack.Decoder(dict[bytes, bytes])


class SegmentBuffers:
    """The memory of one segment under way: a slot, its header, and sealed if there is a codec."""

    def __init__(
        self, chunk_bytes: int, header_bytes: int, payload_bytes: int, codec: bool
    ) -> None:
        self.headers = BufferArena(header_bytes, 1)
        self.sealed = BufferArena(payload_bytes, 1) if codec else None
        slots = BufferArena(payload_bytes, 1)
        arenas = self.headers, self.sealed, slots
        self.regions = [arena.region for arena in arenas if arena is not None]
        self.chunk_bytes = chunk_bytes
        self.region = slots.region
        (self._slot,) = slots.take(1)

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        return self._slot[: round_up(self.chunk_bytes, alignment)]


class NoteBook:
    """The notes that no full segment has yet, and the segment of every other note.

    A segment has ``room_bytes`` for notes. Any thread may call the methods.
    """

    def __init__(self, room_bytes: int) -> None:
        self._room_bytes = room_bytes
        self._pending: dict[OffloadKey, bytes] = {}
        self._home: dict[OffloadKey, OffloadKey] = {}
        self._used: Counter[OffloadKey] = Counter()
        self._has_news = False
        self._lock = threading.Lock()

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._home or key in self._pending

    def add(self, notes: Mapping[OffloadKey, bytes]) -> None:
        """Add the notes of stored chunks.

        A chunk stored anew was lost meanwhile, so other engines need its note in a new segment.
        """
        with self._lock:
            news = {
                key: note
                for key, note in notes.items()
                if note and _size(key, note) <= self._room_bytes
            }
            self._pending |= news
            self._has_news |= bool(news)

    def drop(self, key: OffloadKey) -> None:
        with self._lock:
            self._pending.pop(key, None)
            self._leave(key)

    def clear(self) -> None:
        with self._lock:
            self._pending, self._home, self._used = {}, {}, Counter()

    def place(
        self, keys: Iterable[OffloadKey], segment: OffloadKey, there: Container[OffloadKey]
    ) -> None:
        """Note that a segment has the chunks' notes; ``there`` are the segments in the store.

        Of several segments with a note the first by name is its home, for every engine, so that
        engines never delete each other's last copy.
        """
        with self._lock:
            for key in keys:
                home = self._home.get(key)
                if home is None or segment < home or home not in there:
                    self._leave(key)
                    self._home[key] = segment
                    self._used[segment] += 1

    def settle(self, keys: Iterable[OffloadKey]) -> None:
        """Forget the notes of chunks that a full segment has."""
        with self._lock:
            for key in keys:
                self._pending.pop(key, None)

    def unsaved(self) -> tuple[dict[OffloadKey, bytes], bool]:
        """Return pending notes that fit into a segment, and whether there are more of them.

        If a segment has all of them, return none.
        """
        with self._lock:
            taken: dict[OffloadKey, bytes] = {}
            left_bytes = self._room_bytes
            for key, note in self._pending.items() if self._has_news else ():
                left_bytes -= _size(key, note)
                if left_bytes < 0:
                    return taken, True
                taken[key] = note
            self._has_news = False
            return taken, False

    def failed(self) -> None:
        self._has_news = True

    def is_used(self, segment: OffloadKey) -> bool:
        return self._used[segment] > 0

    def _leave(self, key: OffloadKey) -> None:
        home = self._home.pop(key, None)
        if home is not None:
            self._used[home] -= 1
            if not self._used[home]:
                del self._used[home]


def _size(key: OffloadKey, note: bytes) -> int:
    return len(key) + len(note) + _RECORD_BYTES


@dataclass(eq=False)
class NoteSegments:
    """The segments in a tier. A lost one costs announcements, and never makes a false one.

    A segment is stored, sealed and found like a chunk. A part-filled one is replaced by a new one
    with more notes, under another name, because other engines read a segment once or twice only.
    """

    _call: TierCaller
    _mover: ChunkMover
    _memory: SegmentBuffers
    _clock: Clock
    _rng: random.Random
    _log: TierLog
    # For each segment in the store, how often it is still to be read: another engine may write it
    # before this one has met its chunks.
    _readings: dict[OffloadKey, int] = field(default_factory=dict)
    _part: OffloadKey | None = None

    async def unread(
        self, segments: Collection[OffloadKey], book: NoteBook, *, again: bool
    ) -> AsyncIterator[tuple[OffloadKey, dict[OffloadKey, bytes]]]:
        """Yield the notes of the segments that a scan has met and that are still to be read.

        All are read ``again`` if it is true, or if one has gone that was some chunk's only home.
        """
        gone = self._readings.keys() - set(segments)
        self._readings = {key: self._readings.get(key, 2) for key in segments}
        for reading in range(2):
            if again or (reading and any(map(book.is_used, gone))):
                self._readings = {key: left or 1 for key, left in self._readings.items()}
            elif reading:
                return
            for segment in sorted(segments):
                if self._readings[segment]:
                    self._readings[segment] -= 1
                    if notes := await self._load(segment):
                        yield segment, notes
            if again:
                return

    def was_read(
        self, book: NoteBook, segment: OffloadKey, keys: Iterable[OffloadKey], *, all_met: bool
    ) -> None:
        """Note the chunks of a segment that the store has, maybe all that the segment names."""
        book.place(keys, segment, self._readings)
        if all_met:
            self._readings[segment] = 0

    def new_book(self) -> NoteBook:
        return NoteBook(self._memory.chunk_bytes - _LENGTH.size - _RECORD_BYTES)

    async def save(self, book: NoteBook) -> None:
        """Write the notes that no segment has yet."""
        is_full = True
        while is_full:
            notes, is_full = book.unsaved()
            if not notes:
                return
            segment = make_offload_key(self._rng.randbytes(32), SEGMENT_GROUP)
            try:
                await self._store(segment, notes)
            except (TierError, TimeoutError):
                book.failed()
                raise
            part, self._part = self._part, None if is_full else segment
            if part is not None:
                self._readings.pop(part, None)
            self._readings[segment] = 0
            book.place(notes, segment, self._readings)
            if is_full:
                book.settle(notes)
            await self._delete([] if part is None else [part])

    async def tidy(self, book: NoteBook) -> None:
        """Delete the segments of chunks that are gone, and keep the others from being evicted."""
        kept: list[OffloadKey] = []
        useless: list[OffloadKey] = []
        for segment, readings in self._readings.items():
            is_kept = readings or segment == self._part or book.is_used(segment)
            (kept if is_kept else useless).append(segment)
        await self._delete(useless)
        if kept and Capability.TOUCH in self._call.tier.capabilities:
            most = self._call.tier.max_batch_keys or len(kept)
            for start in range(0, len(kept), most):
                await self._call.touch(kept[start : start + most])

    async def _delete(self, segments: list[OffloadKey]) -> None:
        if self._call.can_delete:
            for segment in segments:
                await self._call.delete([segment])
                self._readings.pop(segment, None)

    async def _store(self, segment: OffloadKey, notes: Mapping[OffloadKey, bytes]) -> None:
        body = msgspec.msgpack.encode(notes)
        payload = self._memory.padded_view(0, 1)
        payload[:] = bytes(len(payload))
        _LENGTH.pack_into(payload, 0, len(body))
        payload[_LENGTH.size : _LENGTH.size + len(body)] = body
        error = await self._move(Operation.STORE, segment)
        if error is not None:
            raise error

    async def _load(self, segment: OffloadKey) -> dict[OffloadKey, bytes]:
        error = await self._move(Operation.LOAD, segment)
        if error is not None:
            self._log.debug("a segment of notes cannot be read: %s", error)
            return {}
        payload = self._memory.padded_view(0, 1)
        (length,) = _LENGTH.unpack_from(payload)
        try:
            return _records.decode(payload[_LENGTH.size : _LENGTH.size + length])
        except msgspec.DecodeError as error:
            self._log.warning("a segment of notes cannot be read: %s", error)
            return {}

    async def _move(self, operation: Operation, segment: OffloadKey) -> TierError | None:
        job = Job(0, operation, [segment], [0], _KEEPER, 0.0)
        moved = Moved()
        async with self._clock.timeout(_DEADLINE_S):
            with self._mover.transfers(job, [0]) as transfers:
                errors = await self._mover.call(operation, transfers, moved)
                if operation is Operation.LOAD:
                    await self._mover.verify(transfers, errors, moved)
        return errors[0]
