"""Pauses that double, with and without jitter."""

from __future__ import annotations

import random

from kvtier_sdk.runner.backoff import JITTER, Backoff


def test_pauses_double_up_to_the_longest_and_begin_with_the_first_after_a_reset() -> None:
    backoff = Backoff(1.0, 30.0)
    assert [backoff.next_s() for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    backoff.reset()
    assert [backoff.next_s(), backoff.next_s()] == [1.0, 2.0]


def test_jitter_shortens_a_pause_a_little() -> None:
    backoff = Backoff(1.0, 8.0, random.Random(0))
    for _ in range(20):
        pause_s = backoff.next_s()
        assert (1 - JITTER) * backoff.pause_s <= pause_s <= backoff.pause_s
    assert backoff.pause_s == 8.0
