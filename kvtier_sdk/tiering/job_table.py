"""A table of a tier's unreleased jobs and of the chunks that the tier removes meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.types import OffloadKey

_MOVES = (Operation.STORE, Operation.LOAD)


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
