from __future__ import annotations

import pytest

from kvtier_sdk.tiering.savings import ComputeRate


def prompt(rate: ComputeRate, now_s: float, chunks: int, step_s: float, steps: int = 1) -> float:
    for _ in range(steps):
        rate.named(chunks, now_s)
        rate.step_ended(now_s)
        now_s += step_s
    for _ in range(2):
        rate.step_ended(now_s)
        now_s += 0.001
    return now_s


def test_nothing_is_known_of_an_engine_that_has_just_begun() -> None:
    rate = ComputeRate()
    now_s = prompt(rate, 0.0, 16, 0.1)
    prompt(rate, now_s, 16, 0.1)
    assert rate.chunk_s is None


def test_the_time_a_chunk_of_prompts_in_one_step_and_in_several() -> None:
    for steps in (1, 4, 400):
        rate, now_s = ComputeRate(), 0.0
        for _ in range(3):
            now_s = prompt(rate, now_s, 16, 0.08, steps)
        assert rate.chunk_s == pytest.approx(0.005, rel=0.1)


def test_an_engine_that_schedules_a_step_ahead() -> None:
    """The first step after a prompt begins at once; the second step waits for the prompt."""
    rate, now_s = ComputeRate(), 0.0
    for _ in range(3):
        rate.step_ended(now_s)
        rate.named(16, now_s)
        rate.step_ended(now_s + 0.0005)
        rate.step_ended(now_s + 0.08)
        now_s += 1.0
    assert rate.chunk_s == pytest.approx(0.005)


def test_answers_and_single_chunks_tell_nothing() -> None:
    rate, now_s = ComputeRate(), 0.0
    for _ in range(100):
        now_s = prompt(rate, now_s, 1, 0.03)
    assert rate.chunk_s is None


def test_an_idle_engine_does_not_count_as_a_slow_one() -> None:
    rate = ComputeRate()
    for now_s in (0.0, 1000.0, 2000.0):
        rate.named(16, now_s)
        rate.step_ended(now_s)
        rate.burst_ended(now_s + 0.08)
    rate.step_ended(3000.0)
    assert rate.chunk_s == pytest.approx(0.005)


def test_a_pause_now_and_then_changes_nothing_and_a_slower_engine_is_noticed() -> None:
    rate, now_s = ComputeRate(), 0.0
    for index in range(31):
        now_s = prompt(rate, now_s, 16, 30.0 if index % 5 == 0 else 0.08)
    assert rate.chunk_s == pytest.approx(0.005, rel=0.1)
    for _ in range(31):
        now_s = prompt(rate, now_s, 16, 0.16)
    assert rate.chunk_s == pytest.approx(0.01, rel=0.1)


def test_steps_in_which_nothing_is_computed_tell_nothing() -> None:
    rate, now_s = ComputeRate(), 0.0
    for _ in range(10):
        rate.named(16, now_s)
        for _ in range(3):
            rate.step_ended(now_s)
            now_s += 0.0003
    assert rate.chunk_s is None
