"""Counters and gauges that a tier makes through its context."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import TierContext, TierContractError
from kvtier_sdk.contract.tier_metrics import MAX_METRICS, TierMetrics

MakeContext = Callable[..., TierContext]
NAMES = st.sampled_from(["a", "b"])


def test_a_name_gives_the_same_counter_each_time(make_context: MakeContext) -> None:
    context = make_context()
    context.counter("resends").add()
    context.counter("resends").add(2)
    context.gauge("idle_connections").set(np.float32(4))
    assert context.metrics.take_changes() == ({"resends": 3.0}, {"idle_connections": 4.0})
    assert all(type(value) is float for part in context.metrics.take_changes() for value in part)


@pytest.mark.parametrize(
    "name", ["", "Resends", "2nd", "re-sends", "a.b", "a" * 65, "a\n", 7, None]
)
def test_a_malformed_name_is_refused(make_context: MakeContext, name: Any) -> None:
    for make in (make_context().counter, make_context().gauge):
        with pytest.raises(TierContractError, match="up to 64 of a-z"):
            make(name)


def test_a_name_is_of_one_kind(make_context: MakeContext) -> None:
    context = make_context()
    context.counter("sent")
    with pytest.raises(TierContractError, match="'sent' cannot be both"):
        context.gauge("sent")


def test_the_number_is_bounded(make_context: MakeContext) -> None:
    context = make_context()
    for number in range(MAX_METRICS):
        (context.gauge if number % 2 else context.counter)(f"n{number}")
    with pytest.raises(TierContractError, match="32 counters and gauges, no more"):
        context.counter("another")
    assert context.counter("n0") is context.counter("n0")


def test_none_can_be_made_once_the_tier_is_open(make_context: MakeContext) -> None:
    context = make_context()
    assert not context.metrics.complete()
    with pytest.raises(TierContractError, match="make it in __init__ or open"):
        context.counter("late")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 10**400, "many", None])
def test_what_is_no_finite_number_is_refused(make_context: MakeContext, number: Any) -> None:
    context = make_context()
    with pytest.raises(TierContractError, match="'c' was given .* but takes 0 or more"):
        context.counter("c").add(number)
    with pytest.raises(TierContractError, match="'g' was given .* but takes a number"):
        context.gauge("g").set(number)
    with pytest.raises(TierContractError, match="takes 0 or more"):
        context.counter("c").add(-1)
    assert context.metrics.take_changes() == ({"c": 0.0}, {"g": 0.0})


def test_nothing_that_threads_add_is_lost(make_context: MakeContext) -> None:
    context = make_context()
    counter = context.counter("sent")

    def add() -> None:
        for _ in range(5000):
            counter.add()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    taken = 0.0
    while any(thread.is_alive() for thread in threads):
        taken += context.metrics.take_changes()[0].get("sent", 0.0)
    taken += context.metrics.take_changes()[0].get("sent", 0.0)
    assert taken == 20_000


@given(
    st.lists(
        st.tuples(st.just("add"), NAMES, st.integers(0, 5))
        | st.tuples(st.just("set"), NAMES, st.integers(-5, 5))
        | st.just(("take", "", 0))
    )
)
def test_changes_add_up_to_the_values(steps: list[tuple[str, str, int]]) -> None:
    metrics = TierMetrics()
    counters: dict[str, float] = {f"count_{name}": 0.0 for name in "ab"}
    gauges: dict[str, float] = {f"level_{name}": 0.0 for name in "ab"}
    for name in counters:
        metrics.counter(name)
    for name in gauges:
        metrics.gauge(name)
    seen_counters: dict[str, float] = dict.fromkeys(counters, 0.0)
    seen_gauges: dict[str, float] = {}
    for kind, name, number in [*steps, ("take", "", 0)]:
        if kind == "add":
            metrics.counter(f"count_{name}").add(number)
            counters[f"count_{name}"] += number
        elif kind == "set":
            metrics.gauge(f"level_{name}").set(number)
            gauges[f"level_{name}"] = number
        else:
            gained, values = metrics.take_changes()
            for counter, gain in gained.items():
                seen_counters[counter] += gain
            seen_gauges |= values
    assert (seen_counters, seen_gauges) == (counters, gauges)
    assert metrics.take_changes() == ({}, {})
