"""Which bytes go where: from block ids and slots to as few copies as there can be.

Numbers only, in arrays: a job may be a hundred thousand pages, planned on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """Where the bytes of one KV-cache group are, on the device and in a chunk.

    A block is cut into *segments*, its longest pieces of adjacent memory; each array has one
    element for each. In a chunk a segment of all its blocks comes first, then the next segment:
    so blocks that are neighbours on the device are neighbours in the chunk.

    Attributes:
        blocks: how many the device has; block ids are below it.
        blocks_per_chunk: consecutive blocks of a request in one chunk.
        addresses: of the segment in block 0.
        strides_bytes: from the segment in one block to the same one in the next.
        lengths_bytes: of the segment.
        offsets_bytes: of the segment of a chunk's first block, from the chunk's first byte.
    """

    blocks: int
    blocks_per_chunk: int
    addresses: Int64s
    strides_bytes: Int64s
    lengths_bytes: Int64s
    offsets_bytes: Int64s

    @property
    def chunk_bytes(self) -> int:
        """Payload of one chunk."""
        return int(self.lengths_bytes.sum()) * self.blocks_per_chunk

    def slots_for(self, blocks: int, first_block: int) -> int:
        """How many slots ``blocks`` blocks touch if the first of them is ``first_block``."""
        return -(-(first_block % self.blocks_per_chunk + blocks) // self.blocks_per_chunk)


@dataclass(frozen=True)
class HostLayout:
    """Where the slots are.

    Attributes:
        slots: how many.
        address: of the first byte of slot 0 that is this worker's.
        row_bytes: distance between slots; larger than the part where workers share them.
        part_bytes: what this worker has of each slot.
        writable: whether stores are allowed.
    """

    slots: int
    address: int
    row_bytes: int
    part_bytes: int
    writable: bool = True


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Runs: pieces of memory to copy, adjacent inside on both sides.

    Attributes:
        device: address of each run on the device.
        host: address of each run in host memory.
        lengths_bytes: of each run; at least 1.
    """

    device: Int64s
    host: Int64s
    lengths_bytes: Int64s

    @property
    def size_bytes(self) -> int:
        """What the copy moves."""
        return int(self.lengths_bytes.sum())

    def split(self, parts: int) -> list[CopyPlan]:
        """Cut into at most ``parts`` plans of the same size, give or take a byte."""
        ends = self.lengths_bytes.cumsum()
        size_bytes = int(ends[-1])
        parts = min(parts, size_bytes)
        cuts = [size_bytes * part // parts for part in range(parts + 1)]
        return [self._cut(ends, begin, end) for begin, end in pairwise(cuts)]

    def _cut(self, ends: Int64s, begin: int, end: int) -> CopyPlan:
        """Bytes ``begin`` to ``end``, of runs that end there: the first and the last in part."""
        first = int(ends.searchsorted(begin, side="right"))
        last = int(ends.searchsorted(end))
        some = slice(first, last + 1)
        device, host, lengths = self.device[some], self.host[some], self.lengths_bytes[some].copy()
        # From the back: a run may be both.
        lengths[-1] -= int(ends[last]) - end
        skipped = begin - int(ends[first] - self.lengths_bytes[first])
        if skipped:
            device, host = device.copy(), host.copy()
            device[0] += skipped
            host[0] += skipped
            lengths[0] -= skipped
        return CopyPlan(device, host, lengths)


def plan_group(
    layout: GroupLayout, host: HostLayout, block_ids: Int64s, first_block: int, slots: Int64s
) -> CopyPlan:
    """The runs of one group's share of a job.

    Args:
        layout: the group's.
        host: the slots'.
        block_ids: consecutive blocks of a request; at least one, all in range.
        first_block: index of the first of them in its request: it may be inside a chunk.
        slots: one for each chunk that the blocks touch, all in range.

    Returns:
        The fewest runs that copy these blocks, in the order of their host addresses.
    """
    per_chunk = layout.blocks_per_chunk
    skipped = first_block % per_chunk
    # Chunk by block; what a job leaves out of its first and last chunk is no block.
    row = np.full(len(slots) * per_chunk, -1, np.int64)
    row[skipped : skipped + len(block_ids)] = block_ids
    whole_chunks = len(block_ids) == len(row)
    grid = row.reshape(-1, per_chunk)
    if (slots[1:] < slots[:-1]).any():
        # Neighbours in the pool must be neighbours here to be found.
        order = slots.argsort(kind="stable")
        grid, slots = grid[order], slots[order]

    # Axes: chunk, segment, block in the chunk; that is the order of host addresses.
    blocks = grid[:, None, :]
    device = layout.addresses[:, None] + blocks * layout.strides_bytes[:, None]
    in_chunk = layout.offsets_bytes[:, None] + np.arange(per_chunk) * layout.lengths_bytes[:, None]
    host_addresses = (host.address + slots * host.row_bytes)[:, None, None] + in_chunk
    lengths = np.empty_like(device)
    lengths[:] = layout.lengths_bytes[:, None]
    if whole_chunks:
        return _merge(device.ravel(), host_addresses.ravel(), lengths.ravel())
    there = np.broadcast_to(blocks >= 0, device.shape)
    return _merge(device[there], host_addresses[there], lengths[there])


def join(plans: Sequence[CopyPlan]) -> CopyPlan:
    """The plans of several groups as one, with the fewest runs."""
    if len(plans) == 1:
        return plans[0]
    nothing = [np.empty(0, np.int64)]
    host = np.concatenate([plan.host for plan in plans] or nothing)
    order = np.argsort(host, kind="stable")
    return _merge(
        np.concatenate([plan.device for plan in plans] or nothing)[order],
        host[order],
        np.concatenate([plan.lengths_bytes for plan in plans] or nothing)[order],
    )


def overlaps(addresses: Int64s, lengths_bytes: Int64s) -> bool:
    """Whether two of these pieces of memory share a byte."""
    order = addresses.argsort(kind="stable")
    begins = addresses[order]
    return bool((begins[1:] < begins[:-1] + lengths_bytes[order][:-1]).any())


def _merge(device: Int64s, host: Int64s, lengths: Int64s) -> CopyPlan:
    if not len(lengths):
        return CopyPlan(device, host, lengths)
    begins_here = np.empty(len(lengths), np.bool_)
    begins_here[0] = True
    ends = device[:-1] + lengths[:-1], host[:-1] + lengths[:-1]
    begins_here[1:] = (device[1:] != ends[0]) | (host[1:] != ends[1])
    (begins,) = begins_here.nonzero()
    if len(begins) == len(lengths):
        return CopyPlan(device, host, lengths)
    return CopyPlan(device[begins], host[begins], np.add.reduceat(lengths, begins))
