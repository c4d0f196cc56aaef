"""Planned copies move the same bytes as a loop over single bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk.worker.planning import (
    CopyPlan,
    GroupLayout,
    HostLayout,
    join,
    share_of,
)

HOST_ADDRESS = 1_000_000


def int64s(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


@st.composite
def layouts(draw: st.DrawFn) -> GroupLayout:
    blocks = draw(st.integers(1, 8))
    per_chunk = draw(st.integers(1, 4))
    lengths, addresses, strides = [], [], []
    address = draw(st.integers(1, 50))
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 4))
        stride = length + draw(st.sampled_from([0, 0, 3]))
        lengths.append(length)
        addresses.append(address)
        strides.append(stride)
        address += stride * blocks + draw(st.sampled_from([0, 5]))
    offsets, steps = (np.cumsum(lengths) - lengths) * per_chunk, int64s(lengths)
    if draw(st.booleans()):
        # Place each block's segments in another order, with gaps. The blocks follow each other.
        order = draw(st.permutations(range(len(lengths))))
        gap = draw(st.integers(0, 2))
        for place, segment in enumerate(order):
            offsets[segment] = gap + sum(lengths[before] + gap for before in order[:place])
        steps[:] = sum(lengths) + gap * len(lengths)
    return GroupLayout(
        blocks, per_chunk, int64s(addresses), int64s(strides), int64s(lengths), offsets, steps
    )


def interleaved(blocks: int, lengths: list[int]) -> GroupLayout:
    offsets = np.cumsum(lengths) - lengths
    strides = np.full(len(lengths), sum(lengths))
    return GroupLayout(blocks, 1, 7 + offsets, strides, int64s(lengths), offsets, int64s(lengths))


@st.composite
def shares(draw: st.DrawFn) -> tuple[GroupLayout, HostLayout, list[int], int, list[int]]:
    layout = draw(layouts() | st.builds(interleaved, st.integers(1, 8), st.just([2, 1, 3])))
    blocks = draw(
        st.lists(st.integers(0, layout.blocks - 1), min_size=1, max_size=8, unique=True)
        | st.just(list(range(layout.blocks)))
    )
    first = draw(st.integers(0, 9))
    wanted = layout.slots_for(len(blocks), first)
    slots = draw(st.permutations(range(wanted + draw(st.integers(0, 3)))))[:wanted]
    part_bytes = layout.chunk_bytes + draw(st.sampled_from([0, 0, 2]))
    row_bytes = part_bytes + draw(st.sampled_from([0, 0, 6]))
    host = HostLayout(max(slots) + 1, HOST_ADDRESS, row_bytes, part_bytes)
    return layout, host, blocks, first, list(slots)


def naive(
    layout: GroupLayout, host: HostLayout, blocks: list[int], first: int, slots: list[int]
) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, block in enumerate(blocks):
        position = first % layout.blocks_per_chunk + number
        row = host.address + slots[position // layout.blocks_per_chunk] * host.row_bytes
        for address, stride, length, offset, step in zip(
            layout.addresses.tolist(),
            layout.strides_bytes.tolist(),
            layout.lengths_bytes.tolist(),
            layout.offsets_bytes.tolist(),
            layout.steps_bytes.tolist(),
            strict=True,
        ):
            begin = row + offset + position % layout.blocks_per_chunk * step
            for byte in range(length):
                assert begin + byte not in found
                found[begin + byte] = address + block * stride + byte
    return found


def fewest_runs(pairs: dict[int, int]) -> int:
    return sum(pairs.get(host - 1) != device - 1 for host, device in pairs.items())


def bytes_of(plan: CopyPlan) -> dict[int, int]:
    found: dict[int, int] = {}
    runs = zip(plan.host.tolist(), plan.device.tolist(), plan.lengths_bytes.tolist(), strict=True)
    for host, device, length in runs:
        for byte in range(length):
            assert host + byte not in found
            found[host + byte] = device + byte
    return found


@given(shares())
def test_a_plan_copies_the_same_bytes_as_the_oracle_in_the_fewest_runs(share) -> None:
    layout, host, blocks, first, slots = share
    found = share_of(layout, host, int64s(blocks), first, int64s(slots))
    plan = found.runs()
    expected = naive(*share)
    assert bytes_of(plan) == expected
    assert len(plan.lengths_bytes) == fewest_runs(expected)
    assert found.most_runs() >= len(plan.lengths_bytes)
    assert found.size_bytes == plan.size_bytes == len(expected)
    in_parts = {address - host.address for address in expected}
    assert all(offset % host.row_bytes < host.part_bytes for offset in in_parts)


@given(shares(), st.sets(st.integers(0, 80), max_size=6))
def test_a_plan_that_is_cut_copies_the_same_bytes_and_crosses_no_cut(share, cuts) -> None:
    layout, host, blocks, first, slots = share
    plan = share_of(layout, host, int64s(blocks), first, int64s(slots)).runs()
    addresses = int64s([host.address + cut for cut in sorted(cuts)])
    cut = plan.cut_at(addresses)
    assert bytes_of(cut) == bytes_of(plan)
    ends = cut.host + cut.lengths_bytes
    assert not ((cut.host[:, None] < addresses) & (addresses < ends[:, None])).any()
    crossed = (plan.host[:, None] < addresses) & (
        addresses < (plan.host + plan.lengths_bytes)[:, None]
    )
    assert len(cut.lengths_bytes) == len(plan.lengths_bytes) + crossed.sum()


@given(shares(), st.integers(1, 9))
def test_the_parts_of_a_plan_are_the_plan(share, parts: int) -> None:
    layout, host, blocks, first, slots = share
    plan = share_of(layout, host, int64s(blocks), first, int64s(slots)).runs()
    pieces = plan.split(parts)
    assert len(pieces) == min(parts, plan.size_bytes)
    sizes = [piece.size_bytes for piece in pieces]
    assert max(sizes) - min(sizes) <= 1
    together: dict[int, int] = {}
    for piece in pieces:
        assert (piece.lengths_bytes > 0).all()
        together |= bytes_of(piece)
    assert together == bytes_of(plan)
    assert sum(sizes) == plan.size_bytes


@given(shares(), st.integers(0, 8))
def test_groups_are_joined_with_the_fewest_runs(share, cut: int) -> None:
    layout, host, blocks, _, _ = share
    cut = min(cut, len(blocks))
    slots = list(range(2 * len(blocks)))
    halves = [(blocks[:cut], slots[: len(blocks)]), (blocks[cut:], slots[len(blocks) :])]
    plans, expected = [], {}
    for ids, some in reversed(halves):
        if ids:
            some = some[: layout.slots_for(len(ids), 0)]
            plans.append(share_of(layout, host, int64s(ids), 0, int64s(some)).runs())
            expected |= naive(layout, host, ids, 0, some)
    plan = join(plans)
    assert bytes_of(plan) == expected
    assert len(plan.lengths_bytes) == fewest_runs(expected)
