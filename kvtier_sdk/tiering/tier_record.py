"""A client's records of its tier: unreleased jobs, known chunks and lost chunks."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from typing import Final, TypeAlias

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.runner.jobs import Job, Operation, Verdict
from kvtier_sdk.types import OffloadKey

_PLACES = 2**17  # the most chunks to remember per tier; at 8 bytes each, the table takes 1 MiB
_NOTHING: array[int] = array("q", bytes(8 * _PLACES))  # shared by all tables without a chunk
_MOST_LOSSES = 2**15  # losses in one generation; the two take at most 10 MiB
#: The reason given for a loss that the record lacks. The time given is the record's beginning.
NO_RECORD: Final = "no_record_since"

_MOVES = (Operation.STORE, Operation.LOAD)
_OK: Final = Verdict.OK
_NOT_FOUND: Final = Verdict.NOT_FOUND

Loss: TypeAlias = tuple[str, float]  # the reason and the wall-clock time


class JobTable:
    """A tier's unreleased jobs. A quarantined job has a result, but its I/O may still run."""

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._quarantined: dict[int, Job] = {}
        # For each running store or load, the job's chunks that the tier has removed since the job
        # began. They count as removed, because the removal may have followed the job's I/O.
        self._gone: dict[int, set[OffloadKey]] = {}

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def unreleased(self) -> int:
        """Number of jobs that may still touch their slots."""
        return len(self._running) + len(self._quarantined)

    @property
    def running(self) -> list[Job]:
        return list(self._running.values())

    @property
    def quarantined(self) -> list[Job]:
        return list(self._quarantined.values())

    def add(self, job: Job) -> None:
        self._running[job.job_id] = job
        if job.operation in _MOVES:
            self._gone[job.job_id] = set()

    def conclude(self, job_id: int) -> Job | None:
        job = self._running.pop(job_id, None)
        if job is not None:
            self._quarantined[job_id] = job
        return job

    def release(self, job_id: int) -> Job | None:
        return self._quarantined.pop(job_id, None)

    def note_removed(self, keys: Iterable[OffloadKey]) -> None:
        # Record only each job's own chunks, because a tier can remove many chunks during many jobs.
        removed = set(keys)
        for job_id, gone in self._gone.items():
            gone.update(removed.intersection(self._running[job_id].keys))

    def without_removed(self, job: Job, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the ``keys`` that the tier did not remove during ``job``, which has just ended."""
        gone = self._gone.pop(job.job_id, None)
        return [key for key in keys if key not in gone] if gone else keys


class KnownChunks:
    """A fixed-size table of hashed keys, in which a newer hash may replace an older one.

    If two keys have the same hash, a chunk can wrongly count as known. Its load then fails.
    """

    def __init__(self) -> None:
        self._newest_purged = 0
        self.clear()

    def __contains__(self, key: OffloadKey) -> bool:
        hashed = hash(key)
        return self._hashes[hashed % _PLACES] == hashed

    def discard(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            hashed = hash(key)
            if self._hashes[hashed % _PLACES] == hashed:
                self._hashes[hashed % _PLACES] = 0

    def clear(self) -> None:
        self._hashes = _NOTHING

    def purge(self, newest_job: int) -> None:
        """Forget all chunks, and ignore the results of jobs up to ``newest_job``."""
        self._newest_purged = newest_job
        self.clear()

    def found(self, job: Job, keys: Iterable[OffloadKey]) -> None:
        if job.job_id > self._newest_purged:
            if self._hashes is _NOTHING:
                self._hashes = array("q", _NOTHING)
            for key in keys:
                hashed = hash(key)
                self._hashes[hashed % _PLACES] = hashed

    def loaded(self, job: Job, verdicts: Sequence[Verdict], present: Iterable[OffloadKey]) -> None:
        """Apply a load's verdicts; ``present`` omits the chunks that the tier has removed."""
        if _NOT_FOUND in verdicts or Verdict.TIMEOUT in verdicts:
            # Forget all chunks, so that lookups precede loads again. If one chunk is lost, others
            # may be lost too. After a timeout the tier may hang, which a lookup detects sooner.
            self.clear()
        elif verdicts.count(_OK) == len(verdicts):
            self.found(job, present)
        else:
            self.discard(k for k, v in zip(job.keys, verdicts, strict=True) if v is not _OK)


class Losses:
    """One tier's latest losses of chunks, by hashed key. Any thread may call :meth:`find`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._turned_s = clock.wall_s()
        self._unknown = NO_RECORD, self._turned_s
        # Two generations, because a dictionary cannot drop its oldest entries quickly.
        self._recent: dict[int, Loss] = {}
        self._older: dict[int, Loss] = {}

    def find(self, key: OffloadKey) -> Loss:
        hashed = hash(key)
        return self._recent.get(hashed) or self._older.get(hashed) or self._unknown

    def note(self, keys: Iterable[OffloadKey], reason: str) -> None:
        now_s = self._clock.wall_s()
        self._recent.update(dict.fromkeys(map(hash, keys), (reason, now_s)))
        if len(self._recent) >= _MOST_LOSSES:
            self._older, self._recent = self._recent, {}
            self._unknown, self._turned_s = (NO_RECORD, self._turned_s), now_s

    def failed(
        self, job: Job, verdicts: Sequence[Verdict], unreported: Collection[OffloadKey]
    ) -> None:
        """Record lost chunks. A missing chunk counts only if its removal was ``unreported``."""
        for key, verdict in zip(job.keys, verdicts, strict=True):
            is_unstored = job.operation is Operation.STORE and verdict is not _OK
            is_missing = verdict is _NOT_FOUND and key in unreported
            if is_unstored or is_missing or verdict is Verdict.CORRUPT:
                self.note([key], f"{job.operation.value}.{verdict.value}")
