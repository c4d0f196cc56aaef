from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import ConfigError, PoolLayout
from kvtier_sdk.pool.layout import HEADER_BYTES

layouts = st.builds(
    PoolLayout,
    slots=st.integers(1, 1 << 30),
    part_bytes=st.integers(1, 1 << 30),
    workers=st.integers(1, 64),
    replicated=st.booleans(),
)


@given(layouts)
def test_parts_lie_in_their_row_one_behind_the_other(layout: PoolLayout) -> None:
    offsets = [layout.part_offset(worker) for worker in range(layout.workers)]
    assert all(offset % 64 == 0 for offset in offsets)
    if layout.replicated:
        assert set(offsets) == {0}
    for before, after in pairwise(offsets[: layout.parts]):
        assert 0 <= after - (before + layout.part_bytes) < 64
    assert layout.chunk_bytes == offsets[-1] + layout.part_bytes
    assert layout.row_bytes % 4096 == 0
    assert 0 <= layout.row_bytes - layout.chunk_bytes < 4096
    assert layout.size_bytes == layout.slots * layout.row_bytes


@given(layouts)
def test_the_header_says_all_of_it(layout: PoolLayout) -> None:
    header = layout.to_header()
    assert len(header) == HEADER_BYTES
    assert PoolLayout.from_header(header) == layout


def test_slots_of_a_stride_may_overlap() -> None:
    layout = PoolLayout(slots=3, part_bytes=10_000, stride_bytes=4096)
    assert (layout.row_bytes, layout.size_bytes) == (4096, 2 * 4096 + 3 * 4096)


@pytest.mark.parametrize("header", [b"", bytes(4096), PoolLayout(1, 1).to_header()[:-1]])
def test_anything_else_is_no_header(header: bytes) -> None:
    assert PoolLayout.from_header(header) is None


@pytest.mark.parametrize("change", [{"slots": 0}, {"part_bytes": 0}, {"workers": 0}])
def test_a_pool_of_nothing_or_for_nobody_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="a host pool needs at least one"):
        dataclasses.replace(PoolLayout(1, 1), **change)


@pytest.mark.parametrize("worker", [-1, 4])
@pytest.mark.parametrize("replicated", [False, True])
def test_there_is_no_other_worker(worker: int, replicated: bool) -> None:
    layout = PoolLayout(1, 1, 4, replicated)
    with pytest.raises(ConfigError, match=f"worker {worker} of a host pool of 4: .* 0 to 3"):
        layout.part_offset(worker)
