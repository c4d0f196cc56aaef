"""Messages between an engine and a tier's process, and the socket that carries them.

A message consists of its length, kind and body. The body is MessagePack for jobs and reports, and
JSON for plain data. Messages contain no payloads. Received data is never executed or unpickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Annotated, Any, TypeVar

import msgspec

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.events import OffloadingEvent
from kvtier_sdk.runner.jobs import Job, JobResult, OpeningEnded, Operation, Report, SentReport
from kvtier_sdk.types import OffloadKey, RequestContext

T = TypeVar("T")

PROTOCOL_VERSION = 12

_HEAD = struct.Struct("<IB")
#: The maximum length of a body, enough for seven million keys. A longer message is invalid.
_MAX_BODY_BYTES = 1 << 28
#: The maximum length of a request's params as JSON. Longer params are omitted.
_MAX_PARAMS_BYTES = 1 << 14
READ_BYTES = 1 << 16
#: The peer counts as stuck if more bytes than this are unsent.
_MAX_UNSENT_BYTES = 8 << 20
_params_encoder = json.JSONEncoder(default=str, skipkeys=True)
_log = logging.getLogger("kvtier.runner")

_Slot = Annotated[int, msgspec.Meta(ge=0)]
_JobFields = tuple[
    int, Operation, list[OffloadKey], tuple[_Slot, ...], bytes, bytes, float, tuple[bytes, ...]
]


def _plain(value: Any) -> Any:
    # msgspec cannot encode ranges and numpy types.
    return value.tolist() if hasattr(value, "tolist") else list(value)


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
write_event: Callable[[OffloadingEvent], bytes] = _encode
_job_decoder = msgspec.msgpack.Decoder(_JobFields)
_reports_decoder = msgspec.msgpack.Decoder(list[SentReport])
_event_decoder = msgspec.msgpack.Decoder(OffloadingEvent)
#: The errors that decoding malformed bytes can raise.
_MALFORMED = (msgspec.DecodeError, ValueError, RecursionError, struct.error)


class Kind(IntEnum):
    """The kind of a message. The engine sends it to the child, except where noted."""

    BOOTSTRAP = 1  # plain data from which the child builds the tier
    JOB = 2
    DRAIN = 3  # the time limit in seconds; the child replies whether all jobs have ended
    CLOSE = 4  # the time limit in seconds for draining, closing and exiting
    OPENED = 5  # from the child, which accepts jobs now: true if the tier is open
    REFUSED = 6  # from the child, which then exits: the error of the opening
    REPORTS = 7  # from the child
    LOG = 8  # the end of an outage; from the child: a line for the log
    HUNG = 9  # from the child: a request to be killed, because hanging calls block the tier
    PING = 10  # the child replies with the same kind
    INVENTORY = 11  # from the child: an event for routers
    OPTIONS = 12  # the values of the live options


_KINDS = {kind.value: kind for kind in Kind}


class MessageError(KVTierError):
    """The received bytes are not a message of this release."""


def message(kind: Kind, body: bytes = b"") -> bytes:
    return _HEAD.pack(len(body), kind) + body


def plain_message(kind: Kind, data: object) -> bytes:
    return message(kind, json.dumps(data).encode())


def read_plain(body: bytes) -> Any:
    return _decoded("plain data", json.loads, body)


class MessageSplitter:
    def __init__(self) -> None:
        self._unsplit = bytearray()

    def split(self, data: bytes | memoryview) -> list[tuple[Kind, bytes]]:
        """Add bytes from the stream; return the messages that are now complete."""
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
    request = job.request
    request_id = request.request_id.encode(errors="surrogatepass")
    params = _params_json(request) if request.params else b""
    fields = job.job_id, job.operation, job.keys, job.slots, request_id, params, job.deadline_s
    return _encode((*fields, job.notes))


def _params_json(request: RequestContext) -> bytes:
    """Return a request's params as JSON, cached in the request; empty if they cannot be encoded."""
    if request._params_json is None:
        text = ""
        try:
            # Stop at the limit, because encoding a client's huge params would block the engine.
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


def read_job(body: bytes) -> Job:
    try:
        job_id, operation, keys, slots, request_id, params, deadline_s, notes = _job_decoder.decode(
            body
        )
        params = json.loads(params) if params else {}
        if not isinstance(params, dict):
            raise ValueError("the request's params are not an object")
        request = RequestContext(request_id.decode(errors="surrogatepass"), params)
    except _MALFORMED as error:
        raise MessageError(f"malformed job: {error}") from None
    return Job(job_id, operation, keys, slots, request, deadline_s, notes=notes)


def write_reports(reports: Sequence[Report]) -> bytes:
    for report in reports:
        if isinstance(report, JobResult | OpeningEnded) and report.error is not None:
            # A file name in the error may contain bytes that are not valid text.
            report.error = report.error.encode(errors="backslashreplace").decode()
    return _encode(reports)


def read_reports(body: bytes) -> list[SentReport]:
    return _decoded("reports", _reports_decoder.decode, body)


def read_event(body: bytes) -> OffloadingEvent:
    return _decoded("event", _event_decoder.decode, body)


def _decoded(what: str, decode: Callable[[bytes], T], body: bytes) -> T:
    try:
        return decode(body)
    except _MALFORMED as error:
        raise MessageError(f"malformed {what}: {error}") from None


class Channel:
    """One end of a socket that carries messages. A channel belongs to one thread."""

    def __init__(self, own: socket.socket) -> None:
        own.setblocking(False)
        self.unpolled: list[SentReport] = []  # reports that the engine's thread has not polled
        self.at_end = False  # true once the peer has closed its end, or the connection is broken
        self._socket = own
        self._readable = select.poll()
        self._readable.register(own, select.POLLIN)
        self._splitter = MessageSplitter()
        self._arrived = memoryview(bytearray(READ_BYTES))
        self._unsent = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_full(self) -> bool:
        """True if so many bytes are unsent that the peer seems stuck."""
        return len(self._unsent) > _MAX_UNSENT_BYTES

    def write(self, data: bytes) -> None:
        """Write without waiting. If the connection is broken, the bytes are lost."""
        self._unsent += data
        self.flush()

    def send(self, data: bytes, event_loop: asyncio.AbstractEventLoop) -> None:
        """Write what the socket accepts now; the event loop sends the rest later."""
        self.write(data)
        if self._unsent:
            event_loop.add_writer(self, self._send_rest, event_loop)

    def flush(self) -> None:
        if not self._unsent:
            return
        try:
            sent_bytes = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # the connection is broken
            sent_bytes = len(self._unsent)
        del self._unsent[:sent_bytes]

    def read(self) -> list[tuple[Kind, bytes]]:
        """Return all messages that have arrived; raise MessageError for invalid bytes."""
        messages: list[tuple[Kind, bytes]] = []
        # Poll first, because a read without data raises an exception, which is much slower.
        while not self.at_end and self._readable.poll(0):
            try:
                count = self._socket.recv_into(self._arrived)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                count = 0
            if count == 0:
                self.at_end = True
            messages += self._splitter.split(self._arrived[:count])
            if count < READ_BYTES:
                break  # the socket is empty, so save the system call of another read
        return messages

    def finish(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(OSError):
            self._socket.sendall(self._unsent)

    def close(self) -> None:
        self.at_end = True
        self._unsent.clear()
        self._socket.close()

    def _send_rest(self, event_loop: asyncio.AbstractEventLoop) -> None:
        self.flush()
        if not self._unsent:
            event_loop.remove_writer(self)
