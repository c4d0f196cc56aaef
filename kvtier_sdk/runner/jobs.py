"""The job model: one asynchronous batch in one direction, its verdicts, and its end.

A job is *concluded* once, when its verdicts are known or its deadline has passed. It is *released*
once, when its I/O has ended. Between the two its slots are in quarantine: the tier may still read
or write them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from kvtier_sdk.errors import (
    ChunkAuthError,
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
from kvtier_sdk.types import OffloadKey, RequestContext, Usage


class Operation(Enum):
    """The kind of a job."""

    LOOKUP = "lookup"
    LOAD = "load"
    STORE = "store"
    TOUCH = "touch"
    DELETE = "delete"
    PURGE = "purge"


#: Stands in a job for every chunk of the namespace; no chunk has this key.
EVERY_CHUNK: OffloadKey = b""


class Verdict(Enum):
    """The outcome of one key of a job; the values are the reasons that are counted."""

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
    (ChunkAuthError, Verdict.AUTH),
    (CorruptChunkError, Verdict.CORRUPT),
    (TierUnavailableError, Verdict.UNAVAILABLE),
    (TierTimeoutError, Verdict.TIMEOUT),
    (TierAuthError, Verdict.AUTH),
    (TierCapacityError, Verdict.CAPACITY),
    (TierContractError, Verdict.CONTRACT),
)


def verdict_of(error: TierError | None) -> Verdict:
    """Return the verdict that a tier's answer for one chunk amounts to."""
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
        job_id: unique among the tier's jobs, and growing.
        operation: what to do.
        keys: on which chunks.
        slots: for loads and stores, the index of each chunk's slot.
        request: on whose behalf.
        deadline_s: when the job has failed, on the injected clock.
        tag: the caller's own object, handed back with the verdicts; it never leaves the engine's
            thread.
        result: the conclusion, once there is one; on the engine's side only.
        queue_bytes: of a store, the payload of all stores under way when it was collected, its own
            included; on the engine's side only.
    """

    job_id: int
    operation: Operation
    keys: Sequence[OffloadKey]
    slots: Sequence[int]
    request: RequestContext
    deadline_s: float
    tag: Any = None
    result: JobResult | None = None
    queue_bytes: int = 0


class JobResult(msgspec.Struct, eq=False, tag=True):
    """A job's one conclusion.

    Attributes:
        job_id: the job's id.
        verdicts: one a key, in the order of the job. For a lookup, ``OK`` means present.
        moved_bytes: payload of the chunks that arrived.
        duration_s: time from the hand-over to the conclusion.
        error: the first error in words, for the log; an absent chunk is no error.
        released: true if the job's I/O has ended too; otherwise
            :meth:`kvtier_sdk.engine.TierListener.released` follows.
        retries: number of calls of the tier that repeated a failed one.
    """

    job_id: int
    verdicts: list[Verdict]
    moved_bytes: int = 0
    duration_s: float = 0.0
    error: str | None = None
    released: bool = True
    retries: int = 0


class IoEnded(msgspec.Struct, eq=False, tag=True):
    """The I/O of a job that was concluded earlier has ended.

    Attributes:
        job_id: the job's id.
    """

    job_id: int


class Progressed(msgspec.Struct, eq=False, tag=True):
    """A call of a job that goes on has returned. Reported now and then.

    Attributes:
        operation: of the job.
    """

    operation: Operation


class ChunksRemoved(msgspec.Struct, eq=False, tag=True):
    """The tier has removed chunks.

    Attributes:
        keys: the chunks.
        evicted: true if they made room for others.
    """

    keys: Sequence[OffloadKey]
    evicted: bool = False


class BreakerMoved(msgspec.Struct, eq=False, tag=True):
    """A circuit breaker of the tier has changed its state.

    Attributes:
        direction: the calls that it guards; they are refused unless it is closed.
        state: the new state.
    """

    direction: Direction
    state: BreakerState


class MetricsChanged(msgspec.Struct, eq=False, tag=True):
    """Counters and gauges of the backend's own have changed.

    Attributes:
        counters: what each has gained since the last report.
        gauges: new values.
    """

    counters: Mapping[str, float]
    gauges: Mapping[str, float]


class UsageChanged(msgspec.Struct, tag=True):
    """The tier has said how full it is.

    Attributes:
        usage: its answer; ``None`` if it cannot be asked.
    """

    usage: Usage | None = None


@dataclass(eq=False, slots=True)
class RunnerStopped:
    """The tier's loop has ended: it takes no job, and has reported all that it concluded.

    Attributes:
        verdict: the verdict of jobs that have no result; their I/O never began or has ended.
        io_ended: true if the I/O of every other job has ended too, because its process is gone.
        reason: the cause in words; ``None`` for an end that was asked for.
    """

    verdict: Verdict
    io_ended: bool
    reason: str | None = None


@dataclass(eq=False, slots=True)
class ProcessStarted:
    """A process of the tier's takes jobs, after the runner had started without one.

    Attributes:
        is_open: true if the tier is open in it; otherwise an :class:`OpeningEnded` follows.
        is_restart: true if another one has died before it.
    """

    is_open: bool
    is_restart: bool


class OpeningEnded(msgspec.Struct, eq=False, tag=True):
    """An attempt to open the tier has ended, after the first one.

    Attributes:
        error: why it failed, in words; ``None`` if the tier is open now.
    """

    error: str | None = None


#: What a tier's loop tells the engine's thread, from the tier's process too.
SentReport: TypeAlias = (
    JobResult
    | IoEnded
    | Progressed
    | ChunksRemoved
    | BreakerMoved
    | MetricsChanged
    | UsageChanged
    | OpeningEnded
)
#: What a runner tells it besides.
Report: TypeAlias = SentReport | RunnerStopped | ProcessStarted


def uniform_result(
    job: Job, verdict: Verdict, *, error: str | None = None, released: bool = True
) -> JobResult:
    """Return a result with the same verdict for every key of a job."""
    return JobResult(job.job_id, [verdict] * len(job.keys), error=error, released=released)


def batches_of(keys: Sequence[OffloadKey], most: int) -> list[Sequence[int]]:
    """Split the keys of a job into those of single calls, none of which names a key twice.

    >>> batches_of([b"a", b"b", b"a", b"c"], 2)
    [[0, 1], [3], [2]]
    """
    # Of the keys that are new, then of those that come for the second time, and so on.
    rounds: list[Sequence[int]] = [range(len(keys))]
    if len(set(keys)) < len(keys):
        rounds = []
        seen: Counter[OffloadKey] = Counter()
        for index, key in enumerate(keys):
            if seen[key] == len(rounds):
                rounds.append([])
            rounds[seen[key]].append(index)  # type: ignore[attr-defined]
            seen[key] += 1
    return [
        indices[start : start + most]
        for indices in rounds
        for start in range(0, len(indices), most)
    ]


def failure_counts(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """Count verdicts other than ``OK`` by reason."""
    counts: dict[str, int] = {}
    for verdict in verdicts:
        if verdict is not Verdict.OK:
            counts[verdict.value] = counts.get(verdict.value, 0) + 1
    return counts
