from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import ConfigError, Region
from kvtier_sdk.runner.buffers import BufferArena

COUNT = 12


@given(st.sampled_from([64, 112, 4096]), st.lists(st.integers(-COUNT, COUNT), max_size=30))
def test_lent_buffers_lie_apart_in_the_region(buffer_bytes: int, steps: list[int]) -> None:
    arena = BufferArena(buffer_bytes, COUNT)
    region = arena.region
    lent: list[memoryview] = []
    for step in steps:
        if step > 0 and len(lent) + step <= COUNT:
            lent += arena.take(step)
        elif step < 0:
            arena.give_back(lent[step:])
            del lent[step:]
        places = [Region.of(buffer) for buffer in lent]
        assert all(region.covers(place) for place in places)
        assert len({place.address for place in places}) == len(lent)
        for address, size_bytes in places:
            assert size_bytes == buffer_bytes
            assert (address - region.address) % buffer_bytes == 0
    assert arena.region == region
    assert region.address % 4096 == 0
    assert region.size_bytes == COUNT * buffer_bytes


def test_too_much_memory_is_refused_with_the_options_to_lower() -> None:
    with pytest.raises(ConfigError, match="lower option 'concurrency' or 'max_batch'"):
        BufferArena(1 << 40, 1 << 20)
