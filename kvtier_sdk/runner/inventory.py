"""Knows which chunks are in a tier's store, and reports each change, whoever made it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import ChunkAuthError, ChunkNotFoundError, CorruptChunkError, TierError
from kvtier_sdk.events import PrefixOrder
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import InventoryChanged, Job, Operation
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.runner.note_segments import SEGMENT_GROUP, NoteSegments
from kvtier_sdk.types import Capability, OffloadKey, split_offload_key

#: Keys of this report at most, and the pause after each report of a scan, so that a scan of a
#: million chunks leaves time to the tier's calls and to the engine.
_REPORT_KEYS = 256
_PAUSE_S = 0.01
#: A scan gives way to the loop's other tasks after this many entries.
_TURN_ENTRIES = 256
#: Time limit for the last notes when a tier is closed.
_LAST_NOTES_S = 2.0
#: Scans take at most a tenth of the time.
_REST = 9


@dataclass(eq=False)
class Inventory:
    """The list of a tier's chunks, kept by the tier's own jobs and corrected by repeated scans.

    Without ``_report`` nobody asks, and nothing is kept. The first report of a loop is ``first``:
    what an earlier loop has reported is void. A scan finds what other processes have stored and
    removed. Any thread may call :meth:`removed`.
    """

    _call: TierCaller
    _clock: Clock
    _interval_s: float
    _report: Callable[[InventoryChanged], None] | None
    _may_scan: Callable[[], bool]
    _log: TierLog
    #: Keeps the chunks' notes in the tier; ``None`` if chunks have none.
    _segments: NoteSegments | None = None
    # For each chunk, the number of the last scan that has met it or began before its own store.
    _known: dict[OffloadKey, int] = field(default_factory=dict)
    _scan_number: int = 0
    # The removals since the begin of the oldest running store or scan, each with its number.
    _removals: dict[OffloadKey, int] = field(default_factory=dict)
    _removal: int = 0
    # The known chunks without a note, each with the number of the scan at which it became known.
    _bare: dict[OffloadKey, int] = field(default_factory=dict)
    _begun: list[int] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def during(self) -> Iterator[int]:
        """Yield a number by which :meth:`moved` sees the removals during a store or a scan."""
        if self._report is None:
            yield 0
            return
        with self._lock:
            since = self._removal
            self._begun.append(since)
        try:
            yield since
        finally:
            with self._lock:
                self._begun.remove(since)
                oldest = min(self._begun, default=self._removal)
                while self._removals and next(iter(self._removals.values())) <= oldest:
                    del self._removals[next(iter(self._removals))]

    def moved(self, job: Job, errors: Mapping[int, TierError | None], since: int) -> None:
        """Note what a store has stored, and what a load has not found."""
        if self._report is None:
            return
        if job.operation is Operation.STORE:
            told = job.notes or [b""] * len(job.keys)
            with self._lock:
                # A chunk that was removed since the begin of its store may be gone.
                notes = {
                    job.keys[i]: told[i]
                    for i, error in errors.items()
                    if error is None and self._removals.get(job.keys[i], 0) <= since
                }
                if self._segments is not None:
                    self._segments.add(notes)
                self._add(notes)
        else:
            self.removed(job.keys[i] for i, error in errors.items() if _is_gone(error))

    def removed(self, keys: Iterable[OffloadKey]) -> None:
        if self._report is None:
            return
        with self._lock:
            gone = []
            for key in keys:
                if self._known.pop(key, None) is not None:
                    gone.append(key)
                    self._bare.pop(key, None)
                    if self._segments is not None:
                        self._segments.drop(key)
                if self._begun:
                    self._removal += 1
                    self._removals.pop(key, None)
                    self._removals[key] = self._removal
            self._tell(removed=gone)

    def emptied(self) -> None:
        """Remove all chunks, after a purge."""
        self.removed(list(self._known))

    async def watch(self) -> None:
        """Scan the store again and again, if the tier can list its chunks."""
        if self._report is None:
            return
        self._tell(first=True)
        while Capability.SCAN in self._call.tier.capabilities:
            began_s = self._clock.now_s()
            try:
                if self._may_scan():
                    await self._scan()
                if self._segments is not None:
                    await self._segments.save()
            except (TierError, TimeoutError) as error:
                self._log.debug("its inventory stands still: %s", error or "too slow")
            rest_s = _REST * (self._clock.now_s() - began_s)
            await self._clock.sleep(max(self._interval_s, rest_s))

    async def close(self) -> None:
        """Write the last notes."""
        if self._segments is None:
            return
        try:
            async with self._clock.timeout(_LAST_NOTES_S):
                await self._segments.save()
        except (TierError, TimeoutError) as error:
            self._log.debug("its last notes are lost: %s", error or "too slow")

    async def _scan(self) -> None:
        with self.during() as since:
            with self._lock:
                self._scan_number += 1
            number = self._scan_number
            found: dict[OffloadKey, bytes] = {}
            order = PrefixOrder()
            segments: set[OffloadKey] = set()
            count = 0
            async for entry in self._call.entries():
                key = bytes(entry.key)
                if split_offload_key(key)[1] >= SEGMENT_GROUP:
                    segments.add(key)
                elif not self._met(key, number):
                    found[key] = b""
                count += 1
                if count % _TURN_ENTRIES == 0:
                    await self._clock.sleep(0)
            if self._segments is not None:
                # The last scan's chunks without a note may be in a segment that was read while
                # they were away.
                await self._segments.read(
                    segments,
                    lambda notes: self._take(notes, found, order),
                    lambda: number - 1 in self._bare.values(),
                )
            for part in _parts(order.sort(found)):
                with self._lock:
                    kept = [key for key in part if self._removals.get(key, 0) <= since]
                    self._add({key: found[key] for key in kept})
                await self._clock.sleep(_PAUSE_S)
        with self._lock:
            # Children first, because some routers drop all that follows a removed block.
            gone = [key for key, met in reversed(self._known.items()) if met < number]
        for part in _parts(gone):
            self.removed([key for key in part if self._known.get(key, number) < number])
            await self._clock.sleep(_PAUSE_S)
        if self._segments is not None:
            await self._segments.tidy(self._known)

    def _take(
        self,
        notes: Mapping[OffloadKey, bytes],
        found: dict[OffloadKey, bytes],
        order: PrefixOrder,
    ) -> bool:
        """Add a segment's notes to the chunks found, and the known chunks that had no note."""
        with self._lock:
            for key, note in notes.items():
                if key in self._bare or found.get(key) == b"":
                    found[key] = note
                    order.add(key, note)
            return all(key in self._known or key in found for key in notes)

    def _met(self, key: OffloadKey, number: int) -> bool:
        """Note that a scan has met a chunk; return false if the chunk was not known."""
        with self._lock:
            if key not in self._known:
                return False
            self._known[key] = number
            return True

    def _add(self, notes: Mapping[OffloadKey, bytes]) -> None:
        told = [key for key, note in notes.items() if note or key not in self._known]
        if self._segments is not None:
            for key in told:
                if notes[key]:
                    self._bare.pop(key, None)
                else:
                    self._bare[key] = self._scan_number
        self._known.update(dict.fromkeys(notes, self._scan_number))
        self._tell(told, [notes[key] for key in told])

    def _tell(
        self,
        stored: Sequence[OffloadKey] = (),
        notes: Sequence[bytes] = (),
        removed: Sequence[OffloadKey] = (),
        first: bool = False,
    ) -> None:
        if self._report is not None and (stored or removed or first):
            self._report(InventoryChanged(stored, notes, removed, first))


def _is_gone(error: TierError | None) -> bool:
    is_lost = isinstance(error, ChunkNotFoundError | CorruptChunkError)
    return is_lost and not isinstance(error, ChunkAuthError)


def _parts(keys: Iterable[OffloadKey]) -> Iterator[list[OffloadKey]]:
    rest = iter(keys)
    while part := list(itertools.islice(rest, _REPORT_KEYS)):
        yield part
