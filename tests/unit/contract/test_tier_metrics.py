from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from kvtier_sdk import TierContext, TierContractError

MakeContext = Callable[..., TierContext]


def test_a_name_gives_the_same_counter_each_time(make_context: MakeContext) -> None:
    context = make_context()
    context.counter("resends").add()
    context.counter("resends").add(2)
    context.gauge("idle_connections").set(np.float32(4))
    assert context.metrics.take_changes() == ({"resends": 3.0}, {"idle_connections": 4.0})
    assert all(type(value) is float for part in context.metrics.take_changes() for value in part)


def test_a_name_is_of_one_kind(make_context: MakeContext) -> None:
    context = make_context()
    context.counter("sent")
    with pytest.raises(TierContractError, match="'sent' cannot be both"):
        context.gauge("sent")


def test_none_can_be_made_once_the_tier_is_open(make_context: MakeContext) -> None:
    context = make_context()
    assert not context.metrics.complete()
    with pytest.raises(TierContractError, match="make it in __init__ or open"):
        context.counter("late")


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
