from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import ConfigError
from kvtier_sdk.worker import KVGroup, KVTensor
from kvtier_sdk.worker.geometry import host_layout

BLOCKS, TOKENS, HEADS, DIM = 6, 4, 2, 8


def cache(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


# Each entry: name, tensor, segments per block, bytes per segment.
LAYOUTS = [
    ("one page", KVTensor(cache(BLOCKS, 64)), 1, 128),
    ("NHD, keys and values in a block", KVTensor(cache(BLOCKS, 2, TOKENS, HEADS, DIM)), 1, 256),
    ("NHD, keys apart from values", KVTensor(cache(2, BLOCKS, TOKENS, HEADS, DIM), 1), 2, 128),
    ("HND", KVTensor(cache(BLOCKS, 2, HEADS, TOKENS, DIM).transpose(2, 3)), 1, 256),
    ("across layers", KVTensor(cache(BLOCKS, 3, 2, TOKENS, HEADS, DIM)), 1, 768),
    ("one layer of those", KVTensor(cache(BLOCKS, 3, 2, TOKENS, HEADS, DIM)[:, 1]), 1, 256),
    ("heads outermost", KVTensor(cache(HEADS, BLOCKS, 2, TOKENS, DIM), 1), 2, 128),
    ("one head of several", KVTensor(cache(BLOCKS, TOKENS, HEADS, DIM)[:, :, 1]), 4, 16),
    ("padded page", KVTensor(cache(BLOCKS, 64)[:, :50]), 1, 100),
    ("kernel blocks", KVTensor(cache(BLOCKS * 3, TOKENS, DIM).unflatten(0, (-1, 3))), 1, 192),
    ("kernel blocks, apart", KVTensor(cache(2, BLOCKS * 3, DIM).unflatten(1, (-1, 3)), 1), 2, 48),
    ("kernel blocks, padded", KVTensor(cache(BLOCKS * 3, 16)[:, :8].unflatten(0, (-1, 3))), 3, 16),
    ("negative dimension", KVTensor(cache(TOKENS, BLOCKS), -1), 4, 2),
]


def naive_addresses(kv: KVTensor) -> list[set[int]]:
    tensor, size = kv.tensor, kv.tensor.element_size()
    found: list[set[int]] = [set() for _ in range(kv.blocks)]
    for index in np.ndindex(tuple(tensor.shape)):
        block = index[kv.block_dim]
        steps = sum(i * stride for i, stride in zip(index, tensor.stride(), strict=True))
        address = tensor.data_ptr() + steps * size
        found[block] |= set(range(address, address + size))
    return found


def described_addresses(kv: KVTensor) -> list[set[int]]:
    addresses, length = kv.segments()
    return [
        {
            address + block * kv.block_stride_bytes + byte
            for address in addresses.tolist()
            for byte in range(length)
        }
        for block in range(kv.blocks)
    ]


@pytest.mark.parametrize(
    ("kv", "segments", "length"), [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS]
)
def test_a_block_has_the_fewest_segments(kv: KVTensor, segments: int, length: int) -> None:
    addresses, segment_bytes = kv.segments()
    assert (len(addresses), segment_bytes) == (segments, length)
    assert described_addresses(kv) == naive_addresses(kv)
    assert kv.page_bytes == segments * length
    assert kv.blocks == BLOCKS


@given(st.data())
def test_any_strided_tensor_is_described_byte_for_byte(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    tensor = torch.zeros([shape[dim] for dim in order], dtype=torch.int16)
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    narrowed = data.draw(st.integers(0, len(shape) - 1))
    tensor = tensor.narrow(narrowed, 0, data.draw(st.integers(1, shape[narrowed])))
    block_dim = data.draw(st.integers(0, len(shape) - 1))
    kv = KVTensor(tensor, block_dim)
    assert described_addresses(kv) == naive_addresses(kv)


def test_a_group_says_where_the_segments_are_in_a_chunk() -> None:
    kv = KVTensor(cache(2, BLOCKS, 5), 1)
    latent = KVTensor(cache(BLOCKS, 3))
    group = KVGroup([kv, latent], blocks_per_chunk=4)
    layout = group.layout()
    assert layout.lengths_bytes.tolist() == [10, 10, 6]
    assert layout.offsets_bytes.tolist() == [0, 40, 80]
    assert layout.strides_bytes.tolist() == [10, 10, 6]
    assert group.chunk_bytes == layout.chunk_bytes == 104
    assert layout.is_dense


def test_an_engine_may_place_each_tensors_pages() -> None:
    kv = KVTensor(cache(2, BLOCKS, 5), 1)
    latent = KVTensor(cache(BLOCKS, 3))
    layout = KVGroup([kv, latent], 4, [(100, 26), (0, 6)]).layout()
    assert layout.offsets_bytes.tolist() == [100, 110, 0]
    assert layout.steps_bytes.tolist() == [26, 26, 6]
    assert layout.chunk_bytes == 100 + 3 * 26 + 20
    assert not layout.is_dense


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVTensor(cache(7, 4), block_dim=2), "block_dim 2"),
        (lambda: KVTensor(cache(7, 4), block_dim=-3), "block_dim -3"),
        (lambda: KVTensor(torch.zeros(())), "block_dim 0"),
        (lambda: KVTensor(cache(7, 0)), "no bytes"),
        (lambda: KVTensor(cache(4, 4).to_sparse()), "strided"),
        (lambda: KVGroup([]), "at least one tensor"),
        (lambda: KVGroup([KVTensor(cache(4, 4))], 0), "blocks_per_chunk"),
        (lambda: KVGroup([KVTensor(cache(4, 4)), KVTensor(cache(5, 4))]), "blocks: 4, 5"),
        (lambda: KVGroup([KVTensor(cache(4, 4))], places=[]), "a place inside the chunk"),
        (lambda: KVGroup([KVTensor(cache(4, 4))], places=[(-8, 8)]), "a place inside the chunk"),
    ],
)
def test_what_cannot_be_described_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_host_memory_may_be_a_column_of_wider_rows() -> None:
    whole = np.zeros((5, 100), np.uint8)
    part = whole[:, 40:70]
    for memory in (part, torch.from_numpy(whole)[:, 40:70], part.view(np.int8)):
        layout = host_layout(memory)
        assert (layout.slots, layout.row_bytes, layout.part_bytes) == (5, 100, 30)
        assert layout.address == whole.ctypes.data + 40


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (np.zeros(8, np.uint8), "shape"),
        (np.zeros((2, 2, 2), np.uint8), "shape"),
        (np.zeros((2, 8), np.uint16), "uint16"),
        (np.zeros((0, 8), np.uint8), "shape"),
        (np.zeros((8, 4), np.uint8).T, "contiguous"),
        (np.zeros((8, 4), np.uint8)[:, ::2], "contiguous"),
        (np.zeros((8, 4), np.uint8)[::-1], "contiguous"),
        (np.broadcast_to(np.zeros(4, np.uint8), (8, 4)), "must not overlap"),
        (torch.zeros(1, 4, dtype=torch.uint8).expand(8, 4), "must not overlap"),
        (torch.zeros(8, 4, dtype=torch.uint8, device="meta"), "on meta"),
    ],
)
def test_host_memory_that_is_no_rows_of_bytes_is_refused(memory, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        host_layout(memory)
