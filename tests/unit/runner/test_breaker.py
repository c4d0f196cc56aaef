"""The circuit breaker, a pure state machine, against a plain model of its rules."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import (
    ChunkNotFoundError,
    CorruptChunkError,
    TierAuthError,
    TierCapacityError,
    TierContractError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvtier_sdk.runner.breaker import Breaker, BreakerState, Direction, Outcome, outcome_of

ANSWERED, LATE, FAILED, BLOCKED = Outcome


def make(**options: Any) -> Breaker:
    defaults = {
        "failures": 5,
        "window": 20,
        "probe_interval_s": 1.0,
        "max_probe_interval_s": 30.0,
        "rng": random.Random(1),
    }
    return Breaker(**{**defaults, **options})


def outcomes(breaker: Breaker, *given: Outcome) -> list[bool]:
    return [breaker.note(outcome, 0.0) for outcome in given]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, ANSWERED),
        (ChunkNotFoundError("gone"), ANSWERED),
        (CorruptChunkError("flipped"), ANSWERED),
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
    st.lists(st.sampled_from(Outcome), max_size=80),
    st.integers(1, 7),
    st.integers(1, 25),
)
def test_it_opens_exactly_when_the_rules_say(
    given: list[Outcome], failures: int, window: int
) -> None:
    breaker = make(failures=failures, window=window)
    past: list[Outcome] = []
    for outcome in given:
        past.append(outcome)
        row = 0
        for earlier in reversed(past):
            if earlier is ANSWERED:
                break
            row += earlier is FAILED
        bad = sum(earlier is not ANSWERED for earlier in past[-window:])
        opens = row >= failures or bad >= window / 2 or outcome is BLOCKED
        assert breaker.note(outcome, 0.0) is opens
        assert breaker.is_closed is not opens
        if opens:
            # A breaker that a probe has closed remembers nothing.
            breaker.begin_probe()
            breaker.end_probe(True, 0.0)
            past.clear()


def test_calls_that_end_while_it_is_open_change_nothing() -> None:
    breaker = make()
    outcomes(breaker, *[FAILED] * 5)
    assert not any(outcomes(breaker, *[ANSWERED] * 30, *[FAILED] * 30))
    assert breaker.state is BreakerState.OPEN
    breaker.begin_probe()
    assert not any(outcomes(breaker, *[ANSWERED] * 30, *[FAILED] * 30))
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.end_probe(True, 0.0)
    assert not any(outcomes(breaker, *[FAILED] * 4))


@given(st.integers(0, 2**32), st.integers(0, 12), st.floats(0, 1e6))
def test_pauses_double_to_the_longest_and_jitter_never_lengthens_them(
    seed: int, failed_probes: int, now_s: float
) -> None:
    breaker = make(rng=random.Random(seed))
    for _ in range(5):
        breaker.note(FAILED, now_s)
    for attempt in range(failed_probes + 1):
        pause_s = min(2.0**attempt, 30.0)
        assert breaker.pause_s == pause_s
        assert 0.9 * pause_s - 1e-6 <= breaker.wait_s(now_s) <= pause_s + 1e-6
        assert breaker.wait_s(now_s + pause_s + 1) == 0
        breaker.begin_probe()
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.end_probe(attempt == failed_probes, now_s)
    assert breaker.is_closed
    assert breaker.pause_s == 1.0, "the next outage is probed from the start again"


def test_engines_do_not_probe_in_step() -> None:
    waits = set()
    for seed in range(20):
        breaker = make(rng=random.Random(seed))
        outcomes(breaker, *[FAILED] * 5)
        waits.add(breaker.wait_s(0.0))
    assert len(waits) == 20
