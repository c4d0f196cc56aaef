"""The jobs of one tier that are not yet released."""

from __future__ import annotations

from collections.abc import Container

from kvtier_sdk.runner.jobs import Job, Operation


class JobTable:
    """Jobs that await their conclusion, and jobs in quarantine. Pure state; one thread."""

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._quarantined: dict[int, Job] = {}

    def __bool__(self) -> bool:
        """True if any job awaits its conclusion."""
        return bool(self._running)

    @property
    def unreleased(self) -> int:
        """Number of jobs that may still touch their slots."""
        return len(self._running) + len(self._quarantined)

    @property
    def running(self) -> list[Job]:
        """Jobs that await their conclusion, oldest first."""
        return list(self._running.values())

    @property
    def quarantined(self) -> list[Job]:
        """Concluded jobs that may still touch their slots."""
        return list(self._quarantined.values())

    @property
    def newest(self) -> int:
        """Id of the newest job that awaits its conclusion; there must be one."""
        return next(reversed(self._running))

    def oldest(self, operations: Container[Operation]) -> int | None:
        """Return the id of the oldest running job with such an operation, or ``None``."""
        running = self._running.items()
        return next((job_id for job_id, job in running if job.operation in operations), None)

    def add(self, job: Job) -> None:
        """Register a job that is being handed over."""
        self._running[job.job_id] = job

    def conclude(self, job_id: int) -> Job | None:
        """Move a job into quarantine."""
        job = self._running.pop(job_id, None)
        if job is not None:
            self._quarantined[job_id] = job
        return job

    def release(self, job_id: int) -> Job | None:
        """Remove a concluded job whose I/O has ended."""
        return self._quarantined.pop(job_id, None)
