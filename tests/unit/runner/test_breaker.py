from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import (
    ChunkAuthError,
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
GONE, FULL = ChunkNotFoundError("gone"), TierCapacityError("full")
FAULT, DOWN = ChunkError("a bad sector"), TierUnavailableError("one node is down")


def make(seed: int = 1, **options: Any) -> Breaker:
    return Breaker(RunnerOptions.model_validate(options), random.Random(seed))


def outcomes(breaker: Breaker, *given: Outcome) -> list[bool]:
    return [breaker.note(outcome) for outcome in given]


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    ("errors", "outcome"),
    [
        ([None], ANSWERED),
        ([GONE], ANSWERED),
        ([CorruptChunkError("flipped")], ANSWERED),
        ([ChunkAuthError("sealed with another key")], ANSWERED),
        ([FAULT, FAULT], FAULTY),
        ([DOWN, DOWN], FAILED),
        ([TierTimeoutError("slow")], FAILED),
        ([TierAuthError("denied")], FAILED),
        ([TierContractError("raised KeyError")], FAILED),
        ([TierError("something")], FAILED),
        # One chunk with an answer proves that the tier works.
        ([DOWN, GONE, DOWN], ANSWERED),
        ([FAULT, DOWN, None], ANSWERED),
        ([FAULT, DOWN], FAILED),
    ],
)
def test_outcome_of(direction: Direction, errors: list[TierError | None], outcome: Outcome) -> None:
    assert outcome_of(direction, errors) is outcome


def test_a_full_disk_is_a_failure_of_stores_only() -> None:
    assert outcome_of(Direction.WRITE, [FULL]) is FAILED
    assert outcome_of(Direction.READ, [FULL]) is ANSWERED


@given(
    st.lists(
        st.tuples(st.sampled_from(Outcome), st.lists(st.sampled_from(OBJECTS), max_size=3)),
        max_size=80,
    ),
    st.integers(1, 7),
    st.integers(1, 25),
)
def test_its_rules(given: list[tuple[Outcome, list[bytes]]], failures: int, window: int) -> None:
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
            # Once a probe closes the breaker, earlier failures no longer count.
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
def test_pauses_double_and_jitter_only_shortens_them(seed: int, failed_probes: int) -> None:
    breaker = make(seed)
    outcomes(breaker, *[FAILED] * 5)
    for attempt in range(failed_probes + 1):
        assert breaker.backoff.pause_s == min(2.0**attempt, 30.0)
        assert 0.9 * breaker.backoff.pause_s <= breaker.wait_s <= breaker.backoff.pause_s
        breaker.begin_probe()
        assert breaker.state is BreakerState.HALF_OPEN
        breaker.end_probe(attempt == failed_probes)
    assert breaker.is_closed
    assert breaker.backoff.pause_s == 1.0, "the next outage is probed from the start again"


def test_engines_do_not_probe_in_step() -> None:
    breakers = [make(seed) for seed in range(20)]
    for breaker in breakers:
        outcomes(breaker, *[FAILED] * 5)
    assert len({breaker.wait_s for breaker in breakers}) == 20


def test_without_a_source_of_jitter_pauses_are_exact() -> None:
    backoff = Backoff(1.0, 3.0)
    assert [backoff.next_s() for _ in range(4)] == [1.0, 2.0, 3.0, 3.0]
