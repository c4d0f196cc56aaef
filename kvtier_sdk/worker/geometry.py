"""Descriptions of a KV cache's tensors and groups, of host memory, and of a job's blocks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.worker.planning import GroupLayout, HostLayout, Int64s

Indices: TypeAlias = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class KVTensor:
    """One tensor of a KV cache, cut into blocks along one of its dimensions.

    Any order of dimensions and any dtype are allowed. Keys and values may be apart, heads may
    precede tokens, and a tensor may contain several layers. Pass padded pages as a view without the
    padding. If a kernel uses smaller blocks, ``unflatten`` the tensor into the engine's blocks.

    Attributes:
        tensor: the tensor, or a strided view of it.
        block_dim: the dimension that counts blocks.

    Raises:
        ConfigError: the tensor is empty or not strided, or has no dimension ``block_dim``.
    """

    tensor: torch.Tensor
    block_dim: int = 0

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        if self.tensor.layout != torch.strided:
            raise ConfigError(f"a KV tensor must be strided, not {self.tensor.layout}")
        if not -len(shape) <= self.block_dim < len(shape):
            raise ConfigError(
                f"block_dim {self.block_dim} of a KV tensor of {len(shape)} dimensions"
            )
        if 0 in shape:
            raise ConfigError(f"a KV tensor of shape {shape} has no bytes")

    @property
    def blocks(self) -> int:
        """The number of blocks in the tensor."""
        return self.tensor.shape[self.block_dim]

    @property
    def block_stride_bytes(self) -> int:
        """The distance from the start of one block to the start of the next, in bytes."""
        return self.tensor.stride(self.block_dim) * self.tensor.element_size()

    @property
    def page_bytes(self) -> int:
        """The size of one block in bytes, without gaps."""
        return self.tensor.numel() * self.tensor.element_size() // self.blocks

    def segments(self) -> tuple[Int64s, int]:
        """Return the addresses of block 0's contiguous pieces, and their common length in bytes."""
        length_bytes = element_bytes = self.tensor.element_size()
        addresses = np.array([self.tensor.data_ptr()], np.int64)
        block = self.tensor.select(self.block_dim, 0)
        inner = zip(block.shape, block.stride(), strict=True)
        for count, stride in sorted((dim for dim in inner if dim[0] > 1), key=itemgetter(1)):
            if stride * element_bytes == length_bytes:
                length_bytes *= count
            else:
                steps = np.arange(count, dtype=np.int64) * stride * element_bytes
                addresses = (steps[:, None] + addresses).ravel()
        return addresses, length_bytes


@dataclass(frozen=True, eq=False)
class KVGroup:
    """A KV-cache group, whose tensors have the same block ids. Groups may share tensors.

    Attributes:
        tensors: the tensors, in the order of their bytes in a chunk.
        blocks_per_chunk: number of consecutive blocks of a request in one chunk.
        places: for each tensor, two numbers of bytes: the offset of the first block's page in a
            chunk, and the distance from one block's page to the next. Pages must not overlap, but
            may leave gaps for other workers' pages. ``None`` leaves no gaps.

    Raises:
        ConfigError: there is no tensor, the tensors differ in their number of blocks,
            ``blocks_per_chunk`` is less than 1, or ``places`` does not fit the tensors.
    """

    tensors: Sequence[KVTensor]
    blocks_per_chunk: int = 1
    places: Sequence[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ConfigError("a KV-cache group needs at least one tensor")
        if self.blocks_per_chunk < 1:
            raise ConfigError(f"blocks_per_chunk must be at least 1, not {self.blocks_per_chunk}")
        if len(blocks := {tensor.blocks for tensor in self.tensors}) > 1:
            raise ConfigError(
                "the tensors of a KV-cache group must agree in their blocks: "
                f"{', '.join(map(str, sorted(blocks)))}"
            )
        if self.places is not None and (
            len(self.places) != len(self.tensors) or min(map(min, self.places)) < 0
        ):
            raise ConfigError("a KV-cache group needs a place inside the chunk for each tensor")

    @property
    def chunk_bytes(self) -> int:
        """The length of a chunk in a slot, in bytes, including gaps for other workers' pages."""
        return self.layout().chunk_bytes

    def layout(self) -> GroupLayout:
        """Return the addresses, strides and lengths of the group's segments."""
        segments = [tensor.segments() for tensor in self.tensors]
        counts = [len(addresses) for addresses, _ in segments]
        lengths = np.repeat(np.array([length for _, length in segments], np.int64), counts)
        strides = np.array([tensor.block_stride_bytes for tensor in self.tensors], np.int64)
        offsets, steps = (np.cumsum(lengths) - lengths) * self.blocks_per_chunk, lengths
        if self.places is not None:
            begins, steps = np.repeat(np.array(self.places, np.int64), counts, axis=0).T
            in_page = [np.arange(len(addresses)) * length for addresses, length in segments]
            offsets = begins + np.concatenate(in_page)
        return GroupLayout(
            blocks=self.tensors[0].blocks,
            blocks_per_chunk=self.blocks_per_chunk,
            addresses=np.concatenate([addresses for addresses, _ in segments]),
            strides_bytes=np.repeat(strides, counts),
            lengths_bytes=lengths,
            offsets_bytes=offsets,
            steps_bytes=steps,
        )


@dataclass(frozen=True, eq=False)
class DeviceBlocks:
    """The blocks of a job, ordered by group.

    Attributes:
        block_ids: the blocks of group 0, then the blocks of group 1, and so on. The blocks of a
            group are consecutive in a request.
        group_sizes: the number of blocks of each group; ``None`` if there is only one group.
        first_blocks: for each group, the index of its first block in the request; ``None`` means 0.
            The index modulo ``blocks_per_chunk`` is the number of blocks that the job skips in the
            first chunk.
    """

    block_ids: Indices
    group_sizes: Sequence[int] | None = None
    first_blocks: Sequence[int] | None = None


def host_layout(memory: torch.Tensor | NDArray[np.uint8]) -> HostLayout:
    if isinstance(memory, np.ndarray):
        array = whole = memory
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        allocation = whole.ctypes.data
    elif memory.device.type == "cpu":
        array, allocation = memory.detach().numpy(), memory.untyped_storage().data_ptr()
    else:
        raise ConfigError(f"the host memory must be on the CPU, not on {memory.device}")
    if array.ndim != 2 or array.itemsize != 1 or 0 in array.shape:
        raise ConfigError(
            "the host memory must be bytes of shape (slots, part), not "
            f"{array.dtype} of shape {array.shape}"
        )
    row_bytes, byte_stride = array.strides
    slots, part_bytes = array.shape
    if (part_bytes > 1 and byte_stride != 1) or (slots > 1 and row_bytes < part_bytes):
        raise ConfigError(
            f"the rows of the host memory must be contiguous and must not overlap; its strides are "
            f"{array.strides} for rows of {part_bytes} bytes"
        )
    # Memory at a page boundary is probably a mapping, which shares no page with other memory.
    has_own_pages = allocation % mmap.PAGESIZE == 0
    return HostLayout(
        slots, array.ctypes.data, row_bytes, part_bytes, array.flags.writeable, has_own_pages
    )
