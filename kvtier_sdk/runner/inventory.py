"""Lists the chunks in a tier's store, and announces changes made by any process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kvtier_sdk.errors import ChunkAuthError, ChunkNotFoundError, CorruptChunkError, TierError
from kvtier_sdk.events import EventLog, parents_first
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.runner.note_segments import SEGMENT_GROUP, NoteSegments
from kvtier_sdk.types import Capability, OffloadKey, split_offload_key

#: The maximum number of keys in an event. After each event, a scan pauses to let calls run.
_EVENT_KEYS = 256
_PAUSE_S = 0.01
#: A scan yields to the loop's other tasks after this many entries.
_TURN_ENTRIES = 256
#: Time limit for writing the last notes when a tier is closed.
_LAST_NOTES_S = 2.0
#: The pause after a scan, in multiples of its duration. So scans take at most 10 % of the time.
_REST = 9


@dataclass(eq=False)
class Inventory:
    """The list of a tier's chunks, updated by the tier's own jobs and corrected by repeated scans.

    The list stays empty unless an engine or a router receives the events. A loop's first event
    withdraws all chunks that an earlier loop announced. A scan finds the changes that other
    processes made in the store. Any thread may call :meth:`removed`.
    """

    _call: TierCaller
    _interval_s: float
    _events: EventLog
    _may_scan: Callable[[], bool]
    _segments: NoteSegments | None = None  # ``None`` if chunks have no notes
    # Maps chunks to scan numbers. A chunk that is found or stored gets the latest number.
    _known: dict[OffloadKey, int] = field(default_factory=dict)
    _scan_number: int = 0
    _gone: dict[int, set[OffloadKey]] = field(default_factory=dict)  # see :meth:`during`
    _bare: set[OffloadKey] = field(default_factory=set)  # known chunks whose notes are missing
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def during(self) -> Iterator[set[OffloadKey]]:
        """Yield a set that collects the chunks removed during a store or a scan."""
        gone: set[OffloadKey] = set()
        with self._lock:
            self._gone[id(gone)] = gone
        try:
            yield gone
        finally:
            with self._lock:
                del self._gone[id(gone)]

    def moved(
        self, job: Job, errors: Mapping[int, TierError | None], gone: set[OffloadKey]
    ) -> None:
        """Add a store's chunks, except ``gone``; remove a load's missing and damaged chunks."""
        if job.operation is not Operation.STORE:
            lost = ChunkNotFoundError | CorruptChunkError
            self.removed(
                job.keys[index]
                for index, error in errors.items()
                if isinstance(error, lost) and not isinstance(error, ChunkAuthError)
            )
        elif self._events.is_heard:
            told = job.notes or [b""] * len(job.keys)
            stored = {job.keys[i]: told[i] for i, error in errors.items() if error is None}
            with self._lock:
                notes = {key: note for key, note in stored.items() if key not in gone}
                if self._segments is not None:
                    self._segments.add(notes)
                self._add(notes)

    def removed(self, keys: Iterable[OffloadKey]) -> None:
        if not self._events.is_heard:
            return
        keys = list(keys)
        with self._lock:
            for gone in self._gone.values():
                gone.update(keys)
            known = [key for key in keys if self._known.pop(key, None) is not None]
            self._bare.difference_update(known)
            if self._segments is not None:
                self._segments.drop(known)
            self._events.add(known, removed=True)

    def emptied(self) -> None:
        for part in _parts(list(self._known)):
            self.removed(part)

    async def watch(self) -> None:
        """Scan the store repeatedly, if the tier can list its chunks."""
        if not self._events.is_heard:
            return
        self._events.reset()
        while Capability.SCAN in self._call.tier.capabilities:
            began_s = self._call.clock.now_s()
            try:
                if self._may_scan():
                    await self._scan()
                if self._segments is not None:
                    await self._segments.save()
            except (TierError, TimeoutError) as error:
                self._call.log.debug("its inventory stands still: %s", error or "too slow")
            rest_s = _REST * (self._call.clock.now_s() - began_s)
            await self._call.clock.sleep(max(self._interval_s, rest_s))

    async def close(self) -> None:
        if self._segments is not None:
            with suppress(TierError, TimeoutError):
                async with self._call.clock.timeout(_LAST_NOTES_S):
                    await self._segments.save()

    async def _scan(self) -> None:
        with self.during() as gone:
            number = self._scan_number = self._scan_number + 1
            found: dict[OffloadKey, bytes] = {}
            segments: set[OffloadKey] = set()
            count = 0
            async for entry in self._call.entries():
                key = bytes(entry.key)
                with self._lock:
                    if key in self._known:
                        self._known[key] = number
                    elif split_offload_key(key)[1] >= SEGMENT_GROUP:
                        segments.add(key)
                    else:
                        found[key] = b""
                count += 1
                if count % _TURN_ENTRIES == 0:
                    await self._call.clock.sleep(0)
            if self._segments is not None:
                await self._segments.read(segments, lambda notes: self._take(notes, found))
            for part in _parts(parents_first(found)):
                with self._lock:
                    self._add({key: found[key] for key in part if key not in gone})
                await self._call.clock.sleep(_PAUSE_S)
        with self._lock:
            # Remove children first, because some routers drop all blocks after a removed block.
            unmet = [key for key, met in reversed(self._known.items()) if met < number]
        for part in _parts(unmet):
            self.removed([key for key in part if self._known.get(key, number) < number])
            await self._call.clock.sleep(_PAUSE_S)
        if self._segments is not None:
            await self._segments.tidy(self._known)

    def _take(self, notes: Mapping[OffloadKey, bytes], found: dict[OffloadKey, bytes]) -> bool:
        """Add a segment's notes to ``found``; return false if some of their chunks are missing."""
        with self._lock:
            for key, note in notes.items():
                if key in self._bare or found.get(key) == b"":
                    found[key] = note
            return all(key in self._known or key in found for key in notes)

    def _add(self, notes: Mapping[OffloadKey, bytes]) -> None:
        told = [key for key, note in notes.items() if note or key not in self._known]
        if self._segments is not None:
            self._bare.difference_update(told)
            self._bare.update(key for key in told if not notes[key])
        self._known.update(dict.fromkeys(notes, self._scan_number))
        self._events.add(told, removed=False, notes=[notes[key] for key in told])


def _parts(keys: Iterable[OffloadKey]) -> Iterator[list[OffloadKey]]:
    rest = iter(keys)
    while part := list(itertools.islice(rest, _EVENT_KEYS)):
        yield part
