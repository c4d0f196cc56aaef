"""The job model: one asynchronous batch in one direction, its verdicts, and its end.

A job is *concluded* once, when its verdicts are known or its deadline has passed, and *released*
once, when its I/O has ended. Between the two its slots are in quarantine: the tier may still read
or write them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from kvtier_sdk.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    TierAuthError,
    TierCapacityError,
    TierContractError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.types import OffloadKey, RequestContext


class Operation(Enum):
    """What a job does."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    TOUCH = "touch"
    DELETE = "delete"
    PURGE = "purge"


#: Stands in a job for all chunks of the namespace; no chunk is called so.
EVERY_CHUNK: OffloadKey = b""


class Verdict(Enum):
    """What became of one key of a job; the values are the reasons that are counted."""

    OK = "ok"
    NOT_FOUND = "not_found"
    CORRUPT = "corrupt"
    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    AUTH = "auth"
    CAPACITY = "capacity"
    CONTRACT = "contract"
    CANCELLED = "cancelled"
    FAILED = "failed"


_VERDICTS: tuple[tuple[type[TierError], Verdict], ...] = (
    (ChunkNotFoundError, Verdict.NOT_FOUND),
    (CorruptChunkError, Verdict.CORRUPT),
    (TierUnavailableError, Verdict.UNAVAILABLE),
    (TierTimeoutError, Verdict.TIMEOUT),
    (TierAuthError, Verdict.AUTH),
    (TierCapacityError, Verdict.CAPACITY),
    (TierContractError, Verdict.CONTRACT),
)


def verdict_of(error: TierError | None) -> Verdict:
    """The verdict that a tier's answer for one chunk amounts to.

    Args:
        error: what the tier returned; ``None`` is success.

    Returns:
        The verdict; of an error of an unknown subclass, its base's.
    """
    if error is None:
        return Verdict.OK
    for error_class, verdict in _VERDICTS:
        if isinstance(error, error_class):
            return verdict
    return Verdict.FAILED


@dataclass(eq=False, slots=True)
class Job:
    """One batch for one tier.

    Attributes:
        job_id: unique in its manager.
        operation: what to do.
        keys: on which chunks.
        slots: for loads and stores, the index of each chunk's slot.
        request: on whose behalf.
        deadline_s: when it has failed, on the injected clock.
    """

    job_id: int
    operation: Operation
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    request: RequestContext
    deadline_s: float


@dataclass(eq=False, slots=True)
class JobResult:
    """A job's one conclusion.

    Attributes:
        job_id: of which job.
        verdicts: one a key, in the order of the job. For a lookup, ``OK`` is "there".
        moved_bytes: payload of the chunks that arrived.
        duration_s: from the hand-over to the conclusion.
        error: the first error in words, for the log; that a chunk is not there is none.
        released: whether its I/O has ended too; otherwise an :class:`IoEnded` follows.
        retries: how many calls of the tier were repetitions of a failed one.
    """

    job_id: int
    verdicts: list[Verdict]
    moved_bytes: int = 0
    duration_s: float = 0.0
    error: str | None = None
    released: bool = True
    retries: int = 0


@dataclass(eq=False, slots=True)
class IoEnded:
    """The I/O of a job that was concluded before has ended.

    Attributes:
        job_id: of which job.
    """

    job_id: int


@dataclass(eq=False, slots=True)
class ChunksRemoved:
    """A tier let go of chunks.

    Attributes:
        keys: which.
    """

    keys: Sequence[OffloadKey]


@dataclass(eq=False, slots=True)
class BreakerMoved:
    """A circuit breaker of the tier has changed its state.

    Attributes:
        direction: which of the two; what it guards is refused unless it is closed.
        state: the new one.
    """

    direction: Direction
    state: BreakerState


@dataclass(eq=False, slots=True)
class ProcessRestarted:
    """The tier's process had died, and another one has opened the tier."""


#: What a runner tells the manager.
Report: TypeAlias = JobResult | IoEnded | ChunksRemoved | BreakerMoved | ProcessRestarted


class JobTable:
    """The jobs that are not yet released. Pure state; one thread."""

    def __init__(self) -> None:
        self._running: dict[int, Job] = {}
        self._quarantined: dict[int, Job] = {}

    def __bool__(self) -> bool:
        """Whether any job awaits its conclusion."""
        return bool(self._running)

    @property
    def unreleased(self) -> int:
        """How many jobs may still touch their slots."""
        return len(self._running) + len(self._quarantined)

    @property
    def quarantined(self) -> int:
        """How many concluded jobs may still touch their slots."""
        return len(self._quarantined)

    @property
    def newest(self) -> int:
        """Id of the job that was handed over last of those that await their conclusion."""
        return next(reversed(self._running))

    def oldest(self, operation: Operation) -> int | None:
        """Id of the first such job that awaits its conclusion, ``None`` where none does."""
        running = self._running.items()
        return next((job_id for job_id, job in running if job.operation is operation), None)

    def add(self, job: Job) -> None:
        """Register a job that is being handed over."""
        self._running[job.job_id] = job

    def conclude(self, job_id: int) -> Job | None:
        """Take a job's conclusion.

        Args:
            job_id: of the job.

        Returns:
            The job the first time, ``None`` for one that was concluded before or never was.
        """
        job = self._running.pop(job_id, None)
        if job is not None:
            self._quarantined[job_id] = job
        return job

    def release(self, job_id: int) -> Job | None:
        """Take the end of a concluded job's I/O.

        Args:
            job_id: of the job.

        Returns:
            The job the first time, ``None`` for one that is not in quarantine.
        """
        return self._quarantined.pop(job_id, None)

    def take_all(self) -> tuple[list[Job], list[Job]]:
        """Forget all jobs.

        Returns:
            Those that await their conclusion, and those in quarantine.
        """
        taken = list(self._running.values()), list(self._quarantined.values())
        self._running.clear()
        self._quarantined.clear()
        return taken

    def overdue(self, now_s: float, grace_s: float) -> list[Job]:
        """Jobs whose runner should have concluded them by now, and has not.

        Args:
            now_s: the time.
            grace_s: how long after its deadline a job's conclusion may take to arrive.

        Returns:
            Those jobs; they stay until they are concluded.
        """
        return [job for job in self._running.values() if now_s > job.deadline_s + grace_s]


def failure_counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Count verdicts other than ``OK`` by reason.

    Args:
        verdicts: of one job.

    Returns:
        Reason to number of chunks.
    """
    counts: dict[str, int] = {}
    for verdict in verdicts:
        if verdict is not Verdict.OK:
            counts[verdict.value] = counts.get(verdict.value, 0) + 1
    return counts
