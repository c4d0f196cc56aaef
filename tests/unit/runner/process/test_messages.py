from __future__ import annotations

import dataclasses
import functools
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import Locality, Medium, OffloadingEvent, RequestContext
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    MetricsChanged,
    Operation,
    Verdict,
)
from kvtier_sdk.runner.process.messages import (
    Channel,
    Kind,
    MessageError,
    MessageSplitter,
    message,
    read_event,
    read_job,
    read_plain,
    read_reports,
    write_event,
    write_job,
    write_reports,
)

numbers = st.integers(0, 2**62)
keys = st.lists(st.binary(max_size=40), max_size=6)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
requests = st.builds(
    RequestContext,
    request_id=st.text(max_size=8),
    params=st.dictionaries(st.text(max_size=3), plain, max_size=3),
)
jobs = st.builds(
    Job,
    job_id=numbers,
    operation=st.sampled_from(Operation),
    keys=keys,
    slots=st.lists(st.integers(0, 2**32 - 1), max_size=6).map(tuple),
    request=requests,
    deadline_s=st.floats(allow_nan=False),
    notes=st.lists(st.binary(max_size=9), max_size=6).map(tuple),
)
figures = st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3)
reports = st.one_of(
    st.builds(
        JobResult,
        job_id=numbers,
        verdicts=st.lists(st.sampled_from(Verdict), max_size=6),
        moved_bytes=numbers,
        object_bytes=numbers,
        compressed_chunks=numbers,
        coding_s=st.floats(allow_nan=False),
        duration_s=st.floats(allow_nan=False),
        error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        released=st.booleans(),
        retries=st.integers(0, 1000),
    ),
    st.builds(IoEnded, numbers),
    st.builds(ChunksRemoved, keys),
    st.builds(BreakerMoved, st.sampled_from(Direction), st.sampled_from(BreakerState)),
    st.builds(MetricsChanged, figures, figures),
)


texts = st.text(max_size=6)
events = st.builds(
    OffloadingEvent,
    keys,
    texts,
    st.sampled_from(Medium),
    st.sampled_from(Locality),
    st.booleans(),
    keys,
    st.none() | texts,
)


def as_data(items: list[Any]) -> list[tuple[type, dict[str, Any]]]:
    as_dict = msgspec.structs.asdict
    return [
        (type(item), dataclasses.asdict(item) if isinstance(item, Job) else as_dict(item))
        for item in items
    ]


@given(jobs)
def test_a_job_arrives_as_it_was(sent: Job) -> None:
    before = as_data([sent])
    assert as_data([read_job(write_job(sent))]) == before


@given(st.lists(reports, max_size=8))
def test_reports_arrive_as_they_were(sent: list[Any]) -> None:
    assert as_data(read_reports(write_reports(sent))) == as_data(sent)


@given(events)
def test_an_event_arrives_as_it_was(sent: OffloadingEvent) -> None:
    assert read_event(write_event(sent)) == sent


Ends = tuple[Channel, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


NESTED = b"\x91" * 100_000
UNKNOWN_VERDICT = write_reports([JobResult(1, [Verdict.OK])]).replace(b"\xa2ok", b"\xa2no")
NEGATIVE_SLOT = write_job(Job(1, Operation.LOAD, [b"k"], (-1,), RequestContext("r"), 1.0))
PARAMS = write_job(Job(1, Operation.LOOKUP, [b"k"], (), RequestContext("r", {"a": 1}), 1.0))


@pytest.mark.parametrize(
    ("read", "body"),
    [
        pytest.param(read_reports, b"\xdd\xff\xff\xff\xff", id="four billion reports"),
        pytest.param(read_reports, b"\x91\x95\xc0\xc0\xc0\xc0" + NESTED, id="deep nesting"),
        pytest.param(read_reports, UNKNOWN_VERDICT, id="an unknown verdict"),
        pytest.param(read_job, NEGATIVE_SLOT, id="a negative slot"),
        pytest.param(read_job, PARAMS.replace(b'{"a": 1}', b"[[[[1]]]]"), id="params in a list"),
        pytest.param(read_job, PARAMS.replace(b'{"a": 1}', b'{"a": 1]'), id="params not JSON"),
        pytest.param(read_plain, b"{", id="not JSON"),
        pytest.param(read_plain, b"[" * 100_000, id="plain data, deeply nested"),
    ],
)
def test_a_malformed_body_is_refused(read: Callable[[bytes], object], body: bytes) -> None:
    with pytest.raises(MessageError, match="malformed"):
        read(body)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=30)), max_size=5), st.data())
def test_a_stream_is_split_anywhere(sent: list[tuple[Kind, bytes]], data: st.DataObject) -> None:
    stream = b"".join(message(kind, body) for kind, body in sent)
    splitter = MessageSplitter()
    arrived = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        arrived += splitter.split(stream[:size])
        stream = stream[size:]
    assert arrived == sent


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"\0\0\0\0\x63", "kind 99 and 0 bytes"),
        (b"\xff\xff\xff\x7f" + bytes([Kind.REPORTS]), "kind 7 and 2147483647 bytes"),
    ],
)
def test_an_invalid_head_is_refused_at_once(ends: Ends, head: bytes, said: str) -> None:
    channel, theirs = ends
    theirs.sendall(head)
    with pytest.raises(MessageError, match=f"a message of {said}"):
        channel.read()


def test_an_error_that_names_a_file_with_any_bytes_arrives() -> None:
    error = os.fsdecode(b"no such file: /data/\xff")
    (result,) = read_reports(write_reports([JobResult(1, [Verdict.FAILED], error=error)]))
    assert isinstance(result, JobResult)
    assert result.error == r"no such file: /data/\udcff"


@pytest.mark.parametrize(
    "params",
    [
        {"a": ["text"] * 100_000},
        {"a": "x" * 1_000_000},
        functools.reduce(lambda params, _: {"a": params}, range(5000), {}),
    ],
    ids=["many", "long", "deep"],
)
def test_large_params_are_cut(params: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    request = RequestContext("r7", params=params)
    for job_id in range(3):
        job = read_job(write_job(Job(job_id, Operation.LOOKUP, [b"k"], (), request, 1.0)))
        assert job.request.params == {}
    (warning,) = caplog.messages
    assert warning.startswith("request r7: its parameters are not passed to tiers in processes: ")


def test_params_that_json_cannot_express_arrive_as_text() -> None:
    request = RequestContext("r", params={"where": Ellipsis, 3: 1, (1, 2): "no name"})
    job = read_job(write_job(Job(1, Operation.LOOKUP, [b"k"], (), request, 1.0)))
    assert job.request.params == {"where": "Ellipsis", "3": 1}


@pytest.mark.parametrize("unread", [False, True], ids=["closed", "reset"])
def test_what_a_process_wrote_before_its_end_is_read(ends: Ends, unread: bool) -> None:
    channel, theirs = ends
    if unread:
        channel.write(message(Kind.JOB, b"never read"))
    theirs.sendall(message(Kind.LOG, b"last words"))
    theirs.close()
    arrived = channel.read()
    assert [(kind, bytes(body)) for kind, body in arrived] == [(Kind.LOG, b"last words")]
    assert channel.read() == []
    assert channel.at_end


def test_what_the_socket_does_not_accept_is_sent_later_and_in_order(ends: Ends) -> None:
    ours, theirs = ends[0], Channel(ends[1])
    sent = [(Kind.JOB, bytes([n]) * 100_000) for n in range(20)]
    for kind, body in sent:
        ours.write(message(kind, body))
    assert ours._unsent
    arrived = []
    while len(arrived) < len(sent):
        arrived += [(kind, bytes(body)) for kind, body in theirs.read()]
        ours.flush()
    assert arrived == sent
    assert not ours._unsent


def test_a_peer_that_reads_nothing_fills_it(ends: Ends) -> None:
    channel, theirs = ends
    for _ in range(100):
        channel.write(message(Kind.JOB, bytes(100_000)))
    assert channel.is_full
    theirs.close()
    channel.flush()
    assert not channel._unsent, "for a broken peer it is lost"
