from __future__ import annotations

import gc

from kvtier_sdk.testing.conformance.buffers import LentMemory

PAGE = 4096


def test_the_collector_may_give_parts_back_while_a_gap_is_looked_for() -> None:
    before = gc.get_threshold()
    memory = LentMemory(5000 * PAGE)
    try:
        for allocations in (250, 1000, 1750):
            gc.disable()
            for _ in range(2000):
                garbage: list[object] = [memory._cut(PAGE)]
                garbage.append(garbage)
            del garbage
            gc.set_threshold(gc.get_count()[0] + allocations)
            gc.enable()
            memory._gap(PAGE)
    finally:
        gc.set_threshold(*before)
        gc.enable()
