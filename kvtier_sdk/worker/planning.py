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
        size_bytes = self.size_bytes
        parts = min(parts, size_bytes)
        cuts = np.arange(parts, dtype=np.int64) * size_bytes // parts
        starts = np.cumsum(self.lengths_bytes) - self.lengths_bytes
        run = np.searchsorted(starts, cuts, side="right") - 1
        inside = cuts > starts[run]
        run, into_run = run[inside], (cuts - starts[run])[inside]
        edges = np.insert(starts, run + 1, cuts[inside])
        pieces = CopyPlan(
            np.insert(self.device, run + 1, self.device[run] + into_run),
            np.insert(self.host, run + 1, self.host[run] + into_run),
            np.diff(edges, append=size_bytes),
        )
        bounds = [*np.searchsorted(edges, cuts).tolist(), len(edges)]
        return [pieces._slice(begin, end) for begin, end in pairwise(bounds)]

    def _slice(self, begin: int, end: int) -> CopyPlan:
        return CopyPlan(self.device[begin:end], self.host[begin:end], self.lengths_bytes[begin:end])


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
    if np.any(slots[1:] < slots[:-1]):
        # Neighbours in the pool must be neighbours here to be found.
        order = np.argsort(slots, kind="stable")
        grid, slots = grid[order], slots[order]

    # Axes: chunk, segment, block in the chunk; that is the order of host addresses.
    blocks = grid[:, None, :]
    lengths = layout.lengths_bytes[:, None]
    device = layout.addresses[:, None] + blocks * layout.strides_bytes[:, None]
    in_chunk = layout.offsets_bytes[:, None] + np.arange(per_chunk) * lengths
    host_addresses = (host.address + slots * host.row_bytes)[:, None, None] + in_chunk
    lengths = np.broadcast_to(lengths, device.shape)
    if whole_chunks:
        return _merge(device.ravel(), host_addresses.ravel(), lengths.flatten())
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
    order = np.argsort(addresses, kind="stable")
    begins = addresses[order]
    return bool(np.any(begins[1:] < begins[:-1] + lengths_bytes[order][:-1]))


def _merge(device: Int64s, host: Int64s, lengths: Int64s) -> CopyPlan:
    if not len(lengths):
        return CopyPlan(device, host, lengths)
    begins_here = np.ones(len(lengths), np.bool_)
    ends = device[:-1] + lengths[:-1], host[:-1] + lengths[:-1]
    begins_here[1:] = (device[1:] != ends[0]) | (host[1:] != ends[1])
    begins = np.flatnonzero(begins_here)
    if len(begins) == len(lengths):
        return CopyPlan(device, host, lengths)
    return CopyPlan(device[begins], host[begins], np.add.reduceat(lengths, begins))
