"""Messages between an engine and a tier's process: jobs, reports and plain data.

A message is its length, its kind and its body: MessagePack for jobs and reports, JSON for plain
data. Keys, slot indices and verdicts cross; payloads do not. Nothing received is executed or
unpickled. Both ends are the same release; :data:`PROTOCOL_VERSION` ensures it.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated, Any

import msgspec

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.runner.jobs import Job, JobResult, OpeningEnded, Operation, Report, SentReport
from kvtier_sdk.types import OffloadKey, RequestContext

#: Version of the messages below. A process of another version is refused.
PROTOCOL_VERSION = 6

_HEAD = struct.Struct("<IB")
_LENGTH = struct.Struct("<I")
#: Room for seven million keys. A longer message is invalid; the receiver does not wait for its end.
_MAX_BODY_BYTES = 1 << 28
#: The longest JSON of a request's params.
_MAX_PARAMS_BYTES = 1 << 14
_params_encoder = json.JSONEncoder(default=str, skipkeys=True)
_log = logging.getLogger("kvtier.runner")

_Slot = Annotated[int, msgspec.Meta(ge=0)]
_JobFields = tuple[int, Operation, list[OffloadKey], tuple[_Slot, ...], bytes, bytes, float]


def _plain(value: Any) -> Any:
    """Turn ranges and numpy's types, which msgspec cannot encode, into lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else list(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_job_decoder = msgspec.msgpack.Decoder(_JobFields)
_reports_decoder = msgspec.msgpack.Decoder(list[SentReport])
#: The errors that malformed bytes raise.
_MALFORMED = (msgspec.DecodeError, ValueError, RecursionError, struct.error)


class Kind(IntEnum):
    """The kind of a message."""

    #: To the child: plain data from which it builds the tier.
    BOOTSTRAP = 1
    #: To the child: jobs.
    JOBS = 2
    #: To the child: drain within so many seconds. From the child: whether all jobs ended.
    DRAIN = 3
    #: To the child: drain, close and exit within so many seconds.
    CLOSE = 4
    #: From the child: it accepts jobs, and whether the tier is open.
    OPENED = 5
    #: From the child: the tier cannot be opened, and why; the child exits.
    REFUSED = 6
    #: From the child: reports.
    REPORTS = 7
    #: From the child: a line for the log. To the child: the end of an outage, for its log.
    LOG = 8
    #: From the child: hung calls block the tier, and the process must be killed.
    HUNG = 9
    #: To the child: a running loop answers with the same message.
    PING = 10


_KINDS = {kind.value: kind for kind in Kind}


class MessageError(KVTierError):
    """The bytes received are not a message of this release."""


def message(kind: Kind, body: bytes) -> bytes:
    """Build a message."""
    return _HEAD.pack(len(body), kind) + body


def plain_message(kind: Kind, data: object) -> bytes:
    """Build a message of plain data."""
    return message(kind, json.dumps(data).encode())


def read_plain(body: bytes) -> Any:
    """Read the plain data of a message.

    Raises:
        MessageError: the body is not JSON.
    """
    try:
        return json.loads(body)
    except _MALFORMED as error:
        raise MessageError(f"malformed plain data: {error}") from None


class MessageSplitter:
    """Splits a byte stream into messages."""

    def __init__(self) -> None:
        self._unsplit = bytearray()

    def split(self, data: bytes | memoryview) -> list[tuple[Kind, bytes]]:
        """Add the next bytes of the stream; return the messages that they complete.

        Raises:
            MessageError: a message is of an unknown kind, or too long.
        """
        self._unsplit += data
        messages = []
        at, size = 0, len(self._unsplit)
        while size - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(self._unsplit, at)
            if kind not in _KINDS or length > _MAX_BODY_BYTES:
                raise MessageError(f"a message of kind {kind} and {length} bytes")
            end = at + _HEAD.size + length
            if end > size:
                break
            messages.append((_KINDS[kind], bytes(self._unsplit[at + _HEAD.size : end])))
            at = end
        del self._unsplit[:at]
        return messages


def write_job(job: Job) -> bytes:
    """Encode a job; a message joins encoded jobs.

    Values in the request's ``params`` that JSON cannot express arrive as text. Params that are too
    large, nested too deeply or contain themselves do not arrive.
    """
    request = job.request
    request_id = request.request_id.encode(errors="surrogatepass")
    params = _params_json(request) if request.params else b""
    encoded = _encode(
        (job.job_id, job.operation, job.keys, job.slots, request_id, params, job.deadline_s)
    )
    return _LENGTH.pack(len(encoded)) + encoded


def _params_json(request: RequestContext) -> bytes:
    """Return a request's params as JSON, encoded by the first call."""
    if request._params_json is None:
        text = ""
        try:
            # Part by part: a client may send any amount, and encoding it all would block the
            # engine.
            for part in _params_encoder.iterencode(dict(request.params)):
                text += part
                if len(text) > _MAX_PARAMS_BYTES:
                    raise ValueError(f"their JSON is longer than {_MAX_PARAMS_BYTES} bytes")
        except (ValueError, RecursionError) as error:
            _log.warning(
                "request %s: its parameters are not passed to tiers in processes: %s",
                request.request_id,
                error,
            )
            text = ""
        object.__setattr__(request, "_params_json", text.encode())
    return request._params_json or b""


def read_jobs(body: bytes) -> list[Job]:
    """Decode the jobs of a message.

    Raises:
        MessageError: the body is malformed.
    """
    jobs = []
    rest = memoryview(body)
    try:
        while rest:
            (length,) = _LENGTH.unpack_from(rest)
            end = _LENGTH.size + length
            if end > len(rest):
                raise ValueError("truncated")
            jobs.append(_read_job(rest[_LENGTH.size : end]))
            rest = rest[end:]
    except _MALFORMED as error:
        raise MessageError(f"malformed jobs: {error}") from None
    return jobs


def _read_job(encoded: memoryview) -> Job:
    job_id, operation, keys, slots, request_id, params, deadline_s = _job_decoder.decode(encoded)
    params = json.loads(params) if params else {}
    if not isinstance(params, dict):
        raise ValueError("the request's params are not an object")
    request = RequestContext(request_id.decode(errors="surrogatepass"), params)
    return Job(job_id, operation, keys, slots, request, deadline_s)


def write_reports(reports: Sequence[Report]) -> bytes:
    """Encode a child's reports, which are of the types in ``SentReport``."""
    for report in reports:
        if isinstance(report, JobResult | OpeningEnded) and report.error is not None:
            # A file name in the error may hold bytes that are not text.
            report.error = report.error.encode(errors="backslashreplace").decode()
    return _encode(reports)


def read_reports(body: bytes) -> list[SentReport]:
    """Decode the reports of a message.

    Raises:
        MessageError: the body is malformed.
    """
    try:
        return _reports_decoder.decode(body)
    except _MALFORMED as error:
        raise MessageError(f"malformed reports: {error}") from None
