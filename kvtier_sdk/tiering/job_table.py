"""A tier's unreleased jobs, and the chunks that the tier removed during these jobs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.types import OffloadKey

_MOVES = (Operation.STORE, Operation.LOAD)


class JobTable:
    """A tier's jobs and removals. A quarantined job has a result, but its I/O may still run.

    If a tier reports the removal of a chunk while a job stores or loads the chunk, the removal may
    have happened after the job's I/O, so the chunk counts as removed. Job ids increase, so a
    removal concerns all jobs up to the newest job at that time.
    """

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._quarantined: dict[int, Job] = {}
        # For each removed chunk, the id of the newest job when it was removed; latest removal last.
        self._removals: OrderedDict[OffloadKey, int] = OrderedDict()

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

    def conclude(self, job_id: int) -> Job | None:
        job = self._running.pop(job_id, None)
        if job is not None:
            self._quarantined[job_id] = job
        return job

    def release(self, job_id: int) -> Job | None:
        return self._quarantined.pop(job_id, None)

    @property
    def removals(self) -> int:
        return len(self._removals)

    def note_removed(self, keys: Iterable[OffloadKey]) -> None:
        if self._oldest_move() is None:
            return
        newest = next(reversed(self._running))
        for key in keys:
            self._removals[key] = newest
            self._removals.move_to_end(key)

    def without_removed(self, job: Job, keys: list[OffloadKey]) -> list[OffloadKey]:
        """Return the ``keys`` whose chunks have not left the tier since the job began."""
        removals = self._removals
        if not removals:
            return keys
        kept = [key for key in keys if removals.get(key, 0) < job.job_id]
        # Forget removals that are older than every running store and load.
        oldest = self._oldest_move()
        while removals and (oldest is None or next(iter(removals.values())) < oldest):
            removals.popitem(last=False)
        return kept

    def _oldest_move(self) -> int | None:
        running = self._running.items()
        return next((job_id for job_id, job in running if job.operation in _MOVES), None)
