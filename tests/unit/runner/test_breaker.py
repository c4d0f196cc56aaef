"""The circuit breaker, a pure state machine, against a plain model of its rules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import (
    ChunkError,
    ChunkNotFoundError,
    CorruptChunkError,
    RunnerOptions,
    TierAuthError,
    TierCapacityError,
    TierContractError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvtier_sdk.runner.breaker import Backoff, Breaker, BreakerState, Direction, Outcome, outcome_of

ANSWERED, LATE, FAILED, FAULTY, BLOCKED = Outcome


OBJECTS = [b"%d" % index for index in range(8)]


def make(seed: int = 1, **options: Any) -> Breaker:
    return Breaker(RunnerOptions.model_validate(options), random.Random(seed))


def outcomes(breaker: Breaker, *given: Outcome) -> list[bool]:
    return [breaker.note(outcome) for outcome in given]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, ANSWERED),
        (ChunkNotFoundError("gone"), ANSWERED),
        (CorruptChunkError("flipped"), ANSWERED),
        (ChunkError("a bad sector"), FAULTY),
        (TierUnavailableError("refused"), FAILED),
        (TierTimeoutError("slow"), FAILED),
        (TierAuthError("denied"), FAILED),
        (TierContractError("raised KeyError"), FAILED),
        (TierError("something"), FAILED),
    ],
)
def test_what_counts_as_a_failure(
    direction: Direction, error: TierError | None, outcome: Outcome
) -> None:
    assert outcome_of(direction, [error]) is outcome


def test_a_full_disk_is_a_failure_of_stores_only() -> None:
    full = [TierCapacityError("full")]
    assert outcome_of(Direction.WRITE, full) is FAILED
    assert outcome_of(Direction.READ, full) is ANSWERED


def test_a_batch_in_which_one_chunk_was_answered_is_no_failure() -> None:
    down = TierUnavailableError("one node is down")
    for answer in (None, ChunkNotFoundError("gone")):
        assert outcome_of(Direction.READ, [down, answer, down]) is ANSWERED
    assert outcome_of(Direction.READ, [down, down]) is FAILED


def test_a_batch_of_faulty_objects_is_a_failure_if_the_tier_was_at_fault_too() -> None:
    fault, down = ChunkError("a bad sector"), TierUnavailableError("one node is down")
    assert outcome_of(Direction.READ, [fault, down]) is FAILED
    assert outcome_of(Direction.READ, [fault, fault]) is FAULTY
    assert outcome_of(Direction.READ, [fault, down, None]) is ANSWERED


def test_one_faulty_object_opens_nothing_and_five_do() -> None:
    breaker = make()
    assert not any(breaker.note(FAULTY, OBJECTS[:1]) for _ in range(100))
    assert not breaker.note(FAULTY, OBJECTS[1:4])
    assert not breaker.note(ANSWERED), "a lookup reads no object"
    assert breaker.note(FAULTY, OBJECTS[4:5])


def test_a_transfer_that_goes_well_ends_a_row_of_faulty_objects() -> None:
    breaker = make()
    for _ in range(20):
        assert not breaker.note(FAULTY, OBJECTS[:4])
        assert not breaker.note(ANSWERED, OBJECTS[4:5])


def test_five_failures_in_a_row_open_it() -> None:
    assert outcomes(make(), *[FAILED] * 5) == [False] * 4 + [True]


def test_an_answer_ends_the_row() -> None:
    given = [*[FAILED] * 4, ANSWERED] * 2
    assert not any(outcomes(make(), *given, FAILED))


def test_half_of_the_last_twenty_open_it() -> None:
    given = [FAILED, ANSWERED] * 9
    assert outcomes(make(), *given, FAILED) == [False] * 18 + [True]


def test_what_is_long_past_does_not_count() -> None:
    breaker = make()
    for _ in range(50):
        assert not any(outcomes(breaker, *[FAILED] * 4, *[ANSWERED] * 8))


def test_late_calls_make_no_row_but_count_among_the_last() -> None:
    assert outcomes(make(), *[LATE] * 10) == [False] * 9 + [True]
    # Such a call does not end a row of failures: it is no answer either.
    assert outcomes(make(), FAILED, FAILED, LATE, FAILED, FAILED, FAILED)[-1] is True


@given(
    st.lists(
        st.tuples(st.sampled_from(Outcome), st.lists(st.sampled_from(OBJECTS), max_size=3)),
        max_size=80,
    ),
    st.integers(1, 7),
    st.integers(1, 25),
)
def test_it_opens_exactly_when_the_rules_say(
    given: list[tuple[Outcome, list[bytes]]], failures: int, window: int
) -> None:
    breaker = make(breaker_failures=failures, breaker_window=window)
    past: list[Outcome] = []
    faulty: set[bytes] = set()
    for outcome, objects in given:
        if outcome is FAULTY:
            faulty.update(objects)
            opens = len(faulty) >= failures
        else:
            past.append(outcome)
            row = 0
            for earlier in reversed(past):
                if earlier is ANSWERED:
                    break
                row += earlier is FAILED
            bad = sum(earlier is not ANSWERED for earlier in past[-window:])
            opens = row >= failures or bad >= window / 2 or outcome is BLOCKED
            if outcome is ANSWERED and objects:
                faulty.clear()
        assert breaker.note(outcome, objects) is opens
        assert breaker.is_closed is not opens
        if opens:
            # A breaker that a probe has closed remembers nothing.
            breaker.begin_probe()
            breaker.end_probe(True)
            past.clear()
            faulty.clear()


def test_calls_that_end_while_it_is_open_change_nothing() -> None:
    breaker = make()
    outcomes(breaker, *[FAILED] * 5)
    assert not any(outcomes(breaker, *[ANSWERED] * 30, *[FAILED] * 30))
    assert breaker.state is BreakerState.OPEN
    breaker.begin_probe()
    assert not any(outcomes(breaker, *[ANSWERED] * 30, *[FAILED] * 30))
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.end_probe(True)
    assert not any(outcomes(breaker, *[FAILED] * 4))


@given(st.integers(0, 2**32), st.integers(0, 12))
def test_pauses_double_to_the_longest_and_jitter_never_lengthens_them(
    seed: int, failed_probes: int
) -> None:
    breaker = make(seed)
    outcomes(breaker, *[FAILED] * 5)
    for attempt in range(failed_probes + 1):
        assert breaker.pause_s == min(2.0**attempt, 30.0)
        assert 0.9 * breaker.pause_s <= breaker.wait_s <= breaker.pause_s
        breaker.begin_probe()
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.end_probe(attempt == failed_probes)
    assert breaker.is_closed
    assert breaker.pause_s == 1.0, "the next outage is probed from the start again"


def test_engines_do_not_probe_in_step() -> None:
    breakers = [make(seed) for seed in range(20)]
    for breaker in breakers:
        outcomes(breaker, *[FAILED] * 5)
    assert len({breaker.wait_s for breaker in breakers}) == 20


def test_without_a_source_of_jitter_pauses_are_exact() -> None:
    backoff = Backoff(1.0, 3.0)
    assert [backoff.next_s() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
