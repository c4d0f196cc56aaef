from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.odd_answers import NONSENSE, HalfMadeError
from support.scripted_loop import LOAD, LOOKUP, STORE, Make, Rig

from kvtier_sdk import ChunkNotFoundError, make_offload_key
from kvtier_sdk.runner.jobs import Operation


def answering(rig: Rig, method: str, answer: Callable[[int], Any]) -> None:
    async def call(batch: Any, *_: Any) -> Any:
        return answer(len(batch))

    setattr(rig.tier, method, call)


@pytest.mark.parametrize(
    "answer",
    [
        [True, False, True],
        (1, 0, 1),
        deque([np.True_, np.False_, np.True_]),
        {"a": True, "b": False, "c": np.uint8(1)}.values(),
        np.array([1, 0, 1], np.int64),
        np.array([True, False, True]),
    ],
)
def test_answers_of_a_lookup(make: Make, answer: Any) -> None:
    rig = make()
    answering(rig, "lookup", lambda _: answer)
    assert rig.do(LOOKUP, keys=3) == ["ok", "not_found", "ok"]


@pytest.mark.parametrize("operation", [LOOKUP, LOAD, STORE])
@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_quarantined(
    make: Make, operation: Operation, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    answering(rig, operation.value, NONSENSE[name])
    assert rig.do(operation, keys=3) == ["contract"] * 3
    assert "returned" in str(rig.loop.call.quarantine)
    assert "inside the SDK" not in caplog.text
    assert rig.do(LOOKUP) == ["contract"], "it is not asked again"


def test_calls_in_quarantine_leave_no_trace_behind(make: Make) -> None:
    rig = make()
    answering(rig, "lookup", NONSENSE["nothing"])
    for _ in range(50):
        rig.do(LOOKUP)
    assert rig.loop.call.quarantine is not None
    frames = list(traceback.walk_tb(rig.loop.call.quarantine.__traceback__))
    assert len(frames) < 20


def test_an_author_is_told_what_he_returned(make: Make) -> None:
    for name, told in {
        "a coroutine": "returned a coroutine for a batch of 2",
        "futures": "returned a Future where a boolean belongs",
        "a text": "returned a str where a boolean belongs",
        "one too few": "returned 1 results for a batch of 2",
    }.items():
        rig = make()
        answering(rig, "lookup", NONSENSE[name])
        rig.do(LOOKUP, keys=2)
        assert told in str(rig.loop.call.quarantine)


@pytest.mark.parametrize("operation", [LOAD, STORE])
def test_an_error_that_was_never_initialized_counts(make: Make, operation: Operation) -> None:
    rig = make()
    gone = ChunkNotFoundError("gone")
    answering(rig, operation.value, lambda _: (gone, HalfMadeError(3), gone))
    assert rig.do(operation, keys=3) == ["not_found", "failed", "not_found"]


@pytest.mark.parametrize("entry", [None, make_offload_key(b"x")])
def test_an_entry_that_is_none_quarantines_its_author(make: Make, entry: Any) -> None:
    rig = make()

    async def scan() -> Any:
        yield entry

    rig.tier.scan = scan  # type: ignore[method-assign]
    assert rig.do(Operation.PURGE) == ["contract"]
    assert "where Entry belongs" in str(rig.loop.call.quarantine)
