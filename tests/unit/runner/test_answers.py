"""A tier's answers: used if they are whole, its author's fault if not, harmless in any case."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.odd_answers import NONSENSE, UNREADABLE, Hostile, HostileInt, Sized
from support.runners import RUNNERS
from support.runners import Rig as RunnerRig
from support.scripted_loop import LOAD, LOOKUP, STORE, Rig

from kvtier_sdk import ChunkNotFoundError, Entry, make_offload_key
from kvtier_sdk.runner.jobs import Job, Operation, Verdict

Make = Callable[..., Rig]

YES = [True, 1, np.True_, np.uint8(1), np.int64(1)]
NO = [False, 0, np.False_, np.uint8(0), np.int64(0)]
OTHER: list[Any] = [None, 2, -1, 1.0, np.float64(0), "y", b"", [], Hostile(), HostileInt(1)]
ITEMS = [*YES, *NO, *OTHER]
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "deque": deque,
    "values": lambda items: dict(enumerate(items)).values(),
    "sized": lambda items: Sized(len(items), items),
}


def answering(rig: Rig, method: str, answer: Callable[[int], Any]) -> None:
    """Let a method of the tier answer a batch like this."""

    async def call(batch: Any, *_: Any) -> Any:
        return answer(len(batch))

    setattr(rig.tier, method, call)


def verdicts(rig: Rig, job: Job) -> list[str]:
    rig.submit(job)
    rig.run_for(1.0)
    result = rig.account.results[job.job_id]
    assert {type(verdict) for verdict in result.verdicts} == {Verdict}
    assert type(result.error) in (str, type(None))
    return rig.account.verdicts(job.job_id)


@given(
    # Places, since Hypothesis looks at what it draws.
    st.lists(st.integers(0, len(ITEMS) - 1), min_size=1, max_size=4),
    st.sampled_from(list(CONTAINERS)),
    st.integers(1, 4),
)
def test_an_answer_is_taken_for_what_it_says_or_for_nothing(
    places: list[int], container: str, count: int
) -> None:
    rig = Rig()
    items = [ITEMS[place] for place in places]
    answering(rig, "lookup", lambda _: CONTAINERS[container](items))
    told = verdicts(rig, rig.job(LOOKUP, count))
    if len(items) == count and max(places) < len(YES) + len(NO):
        assert told == ["ok" if place < len(YES) else "not_found" for place in places]
        assert rig.loop._call.quarantine is None
    else:
        assert told == ["contract"] * count
        assert rig.loop._call.quarantine is not None
    rig.close()


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64"])
def test_numpy_answers(make: Make, dtype: str) -> None:
    rig = make()
    answering(rig, "lookup", lambda _: np.array([1, 0, 1]).astype(dtype))
    assert verdicts(rig, rig.job(LOOKUP, 3)) == ["ok", "not_found", "ok"]


@pytest.mark.parametrize("operation", [LOOKUP, LOAD, STORE])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_quarantines_its_author(
    make: Make, operation: Operation, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    answering(rig, operation.value, NONSENSE[name])
    assert verdicts(rig, rig.job(operation, 3)) == ["contract"] * 3
    assert "returned" in str(rig.loop._call.quarantine)
    assert "inside the SDK" not in caplog.text
    assert verdicts(rig, rig.job(LOOKUP)) == ["contract"], "it is not asked again"


@pytest.mark.parametrize("operation", [LOAD, STORE])
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_verdict_that_cannot_be_read_fails_its_chunk_alone(
    make: Make, operation: Operation, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    gone = ChunkNotFoundError("gone")
    answering(rig, operation.value, lambda _: (gone, UNREADABLE[name](), gone))
    assert verdicts(rig, rig.job(operation, 3)) == ["not_found", "contract", "not_found"]
    assert rig.loop._call.quarantine is None
    assert "inside the SDK" not in caplog.text


@pytest.mark.parametrize("operation", [LOOKUP, LOAD, STORE])
@pytest.mark.parametrize("name", UNREADABLE)
def test_an_error_that_cannot_be_read_fails_its_call_alone(
    make: Make, operation: Operation, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()

    def fail(_: int) -> Any:
        raise UNREADABLE[name]()

    answering(rig, operation.value, fail)
    assert verdicts(rig, rig.job(operation, 2)) == ["contract"] * 2
    assert rig.loop._call.quarantine is None
    assert "inside the SDK" not in caplog.text


class MuteError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no")


def test_an_exception_without_a_text_fails_its_call_alone(make: Make) -> None:
    rig = make()

    def fail(_: int) -> Any:
        raise MuteError

    answering(rig, "lookup", fail)
    assert verdicts(rig, rig.job(LOOKUP)) == ["contract"]
    assert "raised MuteError" in str(rig.account.results[0].error)


@pytest.mark.parametrize(
    "entry", [None, make_offload_key(b"x"), Entry("text", 1), Entry(Hostile(), 1), Hostile()]
)
def test_an_entry_that_is_none_quarantines_its_author(make: Make, entry: Any) -> None:
    rig = make()

    async def scan() -> Any:
        yield entry

    rig.tier.scan = scan  # type: ignore[method-assign]
    assert verdicts(rig, rig.job(Operation.PURGE)) == ["contract"]
    assert "where an Entry with its key belongs" in str(rig.loop._call.quarantine)


# --- over each runner, up to the engine's thread -------------------------------------------------


@pytest.fixture(params=RUNNERS)
def make_rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., RunnerRig]]:
    rigs: list[RunnerRig] = []

    def make(**options: Any) -> RunnerRig:
        rigs.append(RunnerRig(request.param, tmp_path, **options))
        rigs[-1].client.open()
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.parametrize("name", ["coroutines", "hostile objects", "no end", "a mapping"])
def test_nonsense_reaches_no_engine(make_rig: Callable[..., RunnerRig], name: str) -> None:
    rig = make_rig(answer=name)
    assert rig.do(Operation.LOOKUP, 0, 1) == ["contract"] * 2
    assert rig.do(Operation.LOAD, 0, 1) == ["contract"] * 2
    assert all("held" in error for error in rig.client.stats.errors)


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_errors_reach_no_engine(make_rig: Callable[..., RunnerRig], name: str) -> None:
    rig = make_rig(answer=name)
    for _ in range(2):  # the second is compared with the first
        assert rig.do(Operation.LOAD, 0) == ["contract"]
    assert rig.client.stats.errors == [
        f"held load: returned a {type(UNREADABLE[name]()).__name__} that cannot be read: "
        "its text, 'retryable', 'tier' and 'operation' are a TierError's own"
    ]


def test_hostile_keys_reach_no_engine(make_rig: Callable[..., RunnerRig]) -> None:
    rig = make_rig(on_lookup="let_go_of_a_hostile_key")
    assert rig.do(Operation.LOOKUP, 0) == ["not_found"]
    rig.wait_for(1, others=1)
    (removed,) = rig.others
    assert {type(key) for key in removed.keys} == {bytes}  # type: ignore[union-attr]
