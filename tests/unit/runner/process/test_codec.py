"""The messages between an engine and a tier's process: what is read is what was written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import RequestContext
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    Operation,
    Verdict,
)
from kvtier_sdk.runner.process.codec import (
    Kind,
    MessageError,
    MessageSplitter,
    message,
    read_jobs,
    read_reports,
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
)
reports = st.one_of(
    st.builds(
        JobResult,
        job_id=numbers,
        verdicts=st.lists(st.sampled_from(Verdict), max_size=6),
        moved_bytes=numbers,
        duration_s=st.floats(allow_nan=False),
        error=st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        released=st.booleans(),
        retries=st.integers(0, 1000),
    ),
    st.builds(IoEnded, numbers),
    st.builds(ChunksRemoved, keys),
    st.builds(BreakerMoved, st.sampled_from(Direction), st.sampled_from(BreakerState)),
)


def as_data(items: list[Any]) -> list[tuple[type, dict[str, Any]]]:
    return [(type(item), dataclasses.asdict(item)) for item in items]


@given(st.lists(jobs, max_size=5))
def test_jobs_arrive_as_they_were(sent: list[Job]) -> None:
    assert as_data(read_jobs(b"".join(map(write_job, sent)))) == as_data(sent)


@given(st.lists(reports, max_size=8))
def test_reports_arrive_as_they_were(sent: list[Any]) -> None:
    assert as_data(read_reports(write_reports(sent))) == as_data(sent)


@given(st.lists(reports, min_size=1, max_size=3), st.integers(1, 10_000))
def test_what_is_cut_short_is_refused_or_is_a_whole_number_of_reports(
    sent: list[Any], cut: int
) -> None:
    written = write_reports(sent)
    shorter = written[: max(0, len(written) - cut)]
    whole = {len(write_reports(sent[:count])) for count in range(len(sent))}
    if len(shorter) in whole:
        read_reports(shorter)
    else:
        with pytest.raises(MessageError):
            read_reports(shorter)


@given(st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=30)), max_size=5), st.data())
def test_frames_are_whole_however_they_were_cut(
    sent: list[tuple[Kind, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(message(kind, body) for kind, body in sent)
    splitter = MessageSplitter()
    arrived = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        arrived += list(splitter.split(stream[:size]))
        stream = stream[size:]
    assert arrived == sent


def test_a_frame_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MessageError, match="a message of kind 99"):
        list(MessageSplitter().split(b"\0\0\0\0\x63"))


def test_a_report_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(MessageError, match="a report of kind 9"):
        read_reports(b"\x09")


def test_what_json_has_no_form_for_arrives_as_text() -> None:
    request = RequestContext("r", params={"where": Ellipsis, 3: 1, (1, 2): "no name"})
    (job,) = read_jobs(write_job(Job(1, Operation.LOOKUP, [b"k"], (), request, 1.0)))
    assert job.request.params == {"where": "Ellipsis", "3": 1}
