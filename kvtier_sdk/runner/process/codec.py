"""What crosses between an engine and a tier's process: messages of jobs, reports and plain data.

A message is its length, its kind and its body, little-endian. Jobs carry keys and slot indices,
reports verdicts; no payload is ever in one. Nothing that arrives is run or unpickled. Both ends are
the same release, which :data:`PROTOCOL_VERSION` makes sure of.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    Operation,
    Report,
    Verdict,
)
from kvtier_sdk.types import OffloadKey, RequestContext

#: Of what is below; a process of another one is not talked to.
PROTOCOL_VERSION = 1

_MESSAGE = struct.Struct("<IB")
_JOB = struct.Struct("<qBdIII")
_RESULT = struct.Struct("<BqQdIBII")
_IO_ENDED = struct.Struct("<Bq")
_REMOVED = struct.Struct("<BI")
_BREAKER = struct.Struct("<BBB")

_OPERATIONS = list(Operation)
_VERDICTS = list(Verdict)
_DIRECTIONS = list(Direction)
_STATES = list(BreakerState)
_CODES: dict[Verdict, int] = {verdict: code for code, verdict in enumerate(_VERDICTS)}

T = TypeVar("T")


class Kind(IntEnum):
    """What is in a message."""

    #: To the child: what it builds the tier from, plain data.
    BOOTSTRAP = 1
    #: To the child: jobs.
    JOBS = 2
    #: To the child: drain, and for how long; from it: whether all ended.
    DRAIN = 3
    #: To the child: drain, close and end, and for how long.
    CLOSE = 4
    #: From the child: the tier is open.
    OPENED = 5
    #: From the child: it is not, and why; the child ends.
    REFUSED = 6
    #: From the child: reports.
    REPORTS = 7
    #: From the child: a line for the log.
    LOG = 8
    #: From the child: calls that hang keep the tier from being used, and the process must end.
    HUNG = 9
    #: To the child: a loop that runs answers with the same.
    PING = 10


_KINDS = {kind.value: kind for kind in Kind}


class MessageError(KVTierError):
    """What arrived is not what this release writes."""


def message(kind: Kind, body: bytes) -> bytes:
    """A message, ready to be written."""
    return _MESSAGE.pack(len(body), kind) + body


def plain_message(kind: Kind, data: object) -> bytes:
    """A message of plain data."""
    return message(kind, json.dumps(data).encode())


def read_plain(body: bytes) -> Any:
    """The plain data of a message."""
    return json.loads(body)


class MessageSplitter:
    """Cuts what arrives into messages, wherever it was cut on its way."""

    def __init__(self) -> None:
        self._arrived = bytearray()

    def split(self, data: bytes | memoryview) -> list[tuple[Kind, bytes]]:
        """Take what has arrived.

        Args:
            data: the next bytes.

        Returns:
            Each message that is whole now.

        Raises:
            MessageError: that is no message.
        """
        if not self._arrived:
            messages, end = _whole_messages(data)
            self._arrived += data[end:]
        else:
            self._arrived += data
            messages, end = _whole_messages(self._arrived)
            del self._arrived[:end]
        return messages


def _whole_messages(data: bytes | bytearray | memoryview) -> tuple[list[tuple[Kind, bytes]], int]:
    """The messages that are whole, and where the last of them ends."""
    messages = []
    at, size = 0, len(data)
    while size - at >= _MESSAGE.size:
        length, kind = _MESSAGE.unpack_from(data, at)
        start = at + _MESSAGE.size
        if start + length > size:
            break
        if kind not in _KINDS:
            raise MessageError(f"a message of kind {kind}")
        at = start + length
        messages.append((_KINDS[kind], bytes(data[start:at])))
    return messages, at


def write_job(job: Job) -> bytes:
    """A job in bytes.

    Of the request's ``params``, what JSON has no form for arrives as text.
    """
    request = job.request
    name = request.request_id.encode(errors="surrogatepass")
    params = b""
    if request.params:
        params = json.dumps(dict(request.params), default=str, skipkeys=True).encode()
    count = len(job.keys)
    head = _JOB.pack(
        job.job_id,
        _OPERATIONS.index(job.operation),
        job.deadline_s,
        len(name),
        len(params),
        count,
    )
    slots = struct.pack(f"<I{len(job.slots)}I", len(job.slots), *job.slots)
    return b"".join((head, name, params, slots, _write_keys(job.keys)))


def read_jobs(body: bytes) -> list[Job]:
    """The jobs of a message.

    Raises:
        MessageError: it does not hold jobs.
    """
    return _read_all(body, _read_job)


def write_reports(reports: Sequence[Report]) -> bytes:
    """Reports in bytes, one behind the other."""
    return b"".join(map(_write_report, reports))


def read_reports(body: bytes) -> list[Report]:
    """The reports of a message.

    Raises:
        MessageError: it does not hold reports.
    """
    return _read_all(body, _read_report)


def _read_all(body: bytes, read_one: Callable[[bytes, int], tuple[T, int]]) -> list[T]:
    items = []
    at = 0
    try:
        while at < len(body):
            item, at = read_one(body, at)
            items.append(item)
    except (struct.error, IndexError, ValueError) as error:
        raise MessageError(f"a message that cannot be read: {error}") from None
    if at > len(body):
        raise MessageError("a message that ends too early")
    return items


def _read_job(body: bytes, at: int) -> tuple[Job, int]:
    job_id, operation, deadline_s, name_bytes, params_bytes, count = _JOB.unpack_from(body, at)
    name_at = at + _JOB.size
    params_at = name_at + name_bytes
    at = params_at + params_bytes
    params: Mapping[str, Any] = json.loads(body[params_at:at]) if params_bytes else {}
    (slot_count,) = struct.unpack_from("<I", body, at)
    slots = struct.unpack_from(f"<{slot_count}I", body, at + 4)
    keys, at = _read_keys(body, at + 4 * (slot_count + 1), count)
    request = RequestContext(body[name_at:params_at].decode(errors="surrogatepass"), params)
    return Job(job_id, _OPERATIONS[operation], keys, slots, request, deadline_s), at


def _write_keys(keys: Sequence[OffloadKey]) -> bytes:
    return struct.pack(f"<{len(keys)}I", *map(len, keys)) + b"".join(keys)


def _read_keys(body: bytes, at: int, count: int) -> tuple[list[OffloadKey], int]:
    lengths = struct.unpack_from(f"<{count}I", body, at)
    ends = list(accumulate(lengths, initial=at + 4 * count))
    return [body[start:end] for start, end in pairwise(ends)], ends[-1]


def _write_report(report: Report) -> bytes:
    if isinstance(report, JobResult):
        return _write_result(report)
    if isinstance(report, IoEnded):
        return _IO_ENDED.pack(1, report.job_id)
    if isinstance(report, ChunksRemoved):
        return _REMOVED.pack(2, len(report.keys)) + _write_keys(report.keys)
    # That a process was started anew is told by its parent.
    assert isinstance(report, BreakerMoved)
    return _BREAKER.pack(3, _DIRECTIONS.index(report.direction), _STATES.index(report.state))


def _write_result(result: JobResult) -> bytes:
    # Its length and one; nothing is 0.
    error = None if result.error is None else result.error.encode(errors="backslashreplace")
    head = _RESULT.pack(
        0,
        result.job_id,
        result.moved_bytes,
        result.duration_s,
        result.retries,
        result.released,
        0 if error is None else len(error) + 1,
        len(result.verdicts),
    )
    return b"".join((head, error or b"", bytes(map(_CODES.__getitem__, result.verdicts))))


def _read_report(body: bytes, at: int) -> tuple[Report, int]:
    kind = body[at]
    if kind == 0:
        return _read_result(body, at)
    if kind == 1:
        return IoEnded(_IO_ENDED.unpack_from(body, at)[1]), at + _IO_ENDED.size
    if kind == 2:
        _, count = _REMOVED.unpack_from(body, at)
        keys, at = _read_keys(body, at + _REMOVED.size, count)
        return ChunksRemoved(keys), at
    if kind == 3:
        _, direction, state = _BREAKER.unpack_from(body, at)
        moved = BreakerMoved(_DIRECTIONS[direction], _STATES[state])
        return moved, at + _BREAKER.size
    raise MessageError(f"a report of kind {kind}")


def _read_result(body: bytes, at: int) -> tuple[JobResult, int]:
    _, job_id, moved_bytes, duration_s, retries, released, error_size, count = _RESULT.unpack_from(
        body, at
    )
    at += _RESULT.size
    error = None
    if error_size:
        error = body[at : at + error_size - 1].decode()
        at += error_size - 1
    verdicts = [_VERDICTS[code] for code in body[at : at + count]]
    result = JobResult(job_id, verdicts, moved_bytes, duration_s, error, bool(released), retries)
    return result, at + count
