"""Jobs, their results, and the reports from a tier to its engine.

A job is *concluded* once, when its verdicts are known or its deadline has passed. A job is
*released* once, when its I/O has ended. Between these two events the job's slots are in quarantine,
because the tier may still read or write them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import msgspec

from kvtier_sdk import errors
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


#: The key of a purge job, which deletes every chunk of the namespace. No chunk has this key.
EVERY_CHUNK: OffloadKey = b""


class Verdict(Enum):
    """The outcome of a job for one key. The metrics count failures by these values."""

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


_VERDICTS = (
    (errors.ChunkNotFoundError, Verdict.NOT_FOUND),
    (errors.ChunkAuthError, Verdict.AUTH),
    (errors.CorruptChunkError, Verdict.CORRUPT),
    (errors.TierUnavailableError, Verdict.UNAVAILABLE),
    (errors.TierTimeoutError, Verdict.TIMEOUT),
    (errors.TierAuthError, Verdict.AUTH),
    (errors.TierCapacityError, Verdict.CAPACITY),
    (errors.TierContractError, Verdict.CONTRACT),
)


def verdict_of(error: errors.TierError | None) -> Verdict:
    if error is None:
        return Verdict.OK
    return next((of for known, of in _VERDICTS if isinstance(error, known)), Verdict.FAILED)


@dataclass(eq=False, slots=True)
class Job:
    """One batch of keys for one operation of one tier.

    Attributes:
        job_id: the job's number; later jobs of the tier have higher numbers.
        operation: the kind of job.
        keys: the chunks' keys.
        slots: for loads and stores, the index of each chunk's slot.
        request: the request that the job serves.
        deadline_s: the time on the tier's clock at which the job fails.
        tag: the caller's own object, which never leaves the engine's thread.
        result: the job's result, or ``None`` until the job is concluded; set by the engine only.
        queue_bytes: for a store, the payload bytes of all unfinished stores including this one.
        notes: for a store whose chunks are announced to routers, each chunk's note.
        handed_s: time on the engine's clock at which the engine submitted the job.
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
    notes: Sequence[bytes] = ()
    handed_s: float = 0.0


class JobResult(msgspec.Struct, eq=False, tag=True):
    """The result of a job. A job never gets a second result.

    Attributes:
        job_id: the job's id.
        verdicts: one per key, in the order of the keys. For a lookup, ``OK`` means present.
        moved_bytes: payload bytes of the loaded or stored chunks, before compression.
        object_bytes: stored length of these chunks, including headers.
        compressed_chunks: number of these chunks that are stored compressed.
        coding_s: seconds that threads spent on compressing or expanding chunks.
        duration_s: seconds from the job's arrival at the tier's loop to its conclusion.
        error: the text of the first error, for the log. An absent chunk is not an error.
        released: true if the job's I/O has ended too; otherwise ``TierListener.released`` follows.
        retries: number of repeated calls to the tier.
    """

    job_id: int
    verdicts: list[Verdict]
    moved_bytes: int = 0
    object_bytes: int = 0
    compressed_chunks: int = 0
    coding_s: float = 0.0
    duration_s: float = 0.0
    error: str | None = None
    released: bool = True
    retries: int = 0


class IoEnded(msgspec.Struct, eq=False, tag=True):
    """The I/O of a job has ended after the job's result was reported."""

    job_id: int


class Progressed(msgspec.Struct, eq=False, tag=True):
    """A batch of an unfinished load or store has ended. These reports are rate-limited."""

    operation: Operation


class ChunksRemoved(msgspec.Struct, eq=False, tag=True):
    """The tier has removed chunks: to make room if ``evicted``, or because they ``expired``."""

    keys: Sequence[OffloadKey]
    evicted: bool = False
    expired: bool = False


class BreakerMoved(msgspec.Struct, eq=False, tag=True):
    direction: Direction
    state: BreakerState


class MetricsChanged(msgspec.Struct, eq=False, tag=True):
    """The backend's own counters have increased, or its gauges have new values."""

    counters: Mapping[str, float]
    gauges: Mapping[str, float]


class UsageChanged(msgspec.Struct, tag=True):
    """The tier's usage has changed. ``usage`` is ``None`` if it is unknown."""

    usage: Usage | None = None


@dataclass(eq=False, slots=True)
class RunnerStopped:
    """The tier's loop accepts no more jobs and sends no more results."""

    verdict: Verdict  # of each job without a result; the job's I/O never began or has ended
    io_ended: bool  # true if the I/O of the concluded jobs has ended too
    reason: str | None = None  # why the tier's process died


@dataclass(eq=False, slots=True)
class ProcessStarted:
    """The tier's process now accepts jobs, after a late start or a restart."""

    is_open: bool  # if false, an :class:`OpeningEnded` follows
    is_restart: bool  # true if an earlier process accepted jobs


class OpeningEnded(msgspec.Struct, eq=False, tag=True):
    """Opening the tier failed with ``error``, or succeeded late if ``error`` is ``None``."""

    error: str | None = None


#: The reports that a tier's loop sends to the engine's thread, in the same process or another.
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
Report: TypeAlias = SentReport | RunnerStopped | ProcessStarted


def uniform_result(
    job: Job, verdict: Verdict, *, error: str | None = None, released: bool = True
) -> JobResult:
    return JobResult(job.job_id, [verdict] * len(job.keys), error=error, released=released)


def batches_of(keys: Sequence[OffloadKey], most: int) -> list[Sequence[int]]:
    """Split keys into batches of at most ``most`` indices. No batch contains the same key twice.

    >>> batches_of([b"a", b"b", b"a", b"c"], 2)
    [[0, 1], [3], [2]]
    """
    rounds: Iterable[Sequence[int]] = [range(len(keys))]
    if len(set(keys)) < len(keys):
        # ``turns[n]`` has the indices of keys that have occurred n times before.
        turns: defaultdict[int, list[int]] = defaultdict(list)
        seen: Counter[OffloadKey] = Counter()
        for index, key in enumerate(keys):
            turns[seen[key]].append(index)
            seen[key] += 1
        rounds = turns.values()
    return [
        indices[start : start + most]
        for indices in rounds
        for start in range(0, len(indices), most)
    ]
