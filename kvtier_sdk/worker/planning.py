"""Plans the minimum number of copies for a job's block ids and slots.

Plans consist of numpy arrays for speed, because a job may have a hundred thousand pages and is
planned on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvtier_sdk.runner.jobs import Operation

Int64s: TypeAlias = NDArray[np.int64]

#: The maximum number of runs in a piece of a job. A gathered chunk counts as one run.
PIECE_RUNS = 256


@dataclass(frozen=True, eq=False)
class GroupLayout:
    """The addresses of one KV-cache group's bytes, on the device and in a chunk.

    A block consists of contiguous pieces of memory, its *segments*. Each array below has an element
    for each segment. Unless ``KVGroup.places`` is set, a chunk begins with the first segments of
    all its blocks; all second segments follow, and so on. In this order, a single run can copy
    adjacent blocks.
    """

    blocks: int  # number of blocks on the device, which limits the block ids
    blocks_per_chunk: int  # number of consecutive blocks of a request in one chunk
    addresses: Int64s  # address of the segment in block 0
    strides_bytes: Int64s  # distance from the segment in one block to the segment in the next
    lengths_bytes: Int64s  # length of the segment
    offsets_bytes: Int64s  # offset of the first block's segment in a chunk
    steps_bytes: Int64s  # distance in a chunk from one block's segment to the next block's

    @property
    def chunk_bytes(self) -> int:
        """The distance from the start of a slot to the end of the last segment, in bytes."""
        last_blocks = self.offsets_bytes + (self.blocks_per_chunk - 1) * self.steps_bytes
        return int((last_blocks + self.lengths_bytes).max())

    @property
    def is_dense(self) -> bool:
        """True if the segments fill a chunk in order, so that a single copy can move the chunk."""
        begins = (self.lengths_bytes.cumsum() - self.lengths_bytes) * self.blocks_per_chunk
        as_long = np.array_equal(self.steps_bytes, self.lengths_bytes)
        return as_long and np.array_equal(self.offsets_bytes, begins)

    def slots_for(self, blocks: int, first_block: int) -> int:
        """Return the number of slots for ``blocks`` consecutive blocks from ``first_block`` on."""
        return -(-(first_block % self.blocks_per_chunk + blocks) // self.blocks_per_chunk)


@dataclass(frozen=True)
class HostLayout:
    """The slots in host memory, and this worker's part of each slot."""

    slots: int
    address: int  # address of the part of slot 0
    row_bytes: int  # distance from slot to slot; exceeds ``part_bytes`` if workers share each slot
    part_bytes: int
    writable: bool = True
    has_own_pages: bool = True  # false if the first or last page may contain other owners' bytes

    @property
    def end(self) -> int:
        """The address of the first byte after this worker's part of the last slot."""
        return self.address + (self.slots - 1) * self.row_bytes + self.part_bytes


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """The runs to copy, sorted by ``host``. A run's bytes are contiguous on device and host."""

    device: Int64s
    host: Int64s
    lengths_bytes: Int64s

    @property
    def size_bytes(self) -> int:
        return int(self.lengths_bytes.sum())

    @property
    def runs(self) -> int:
        return len(self.lengths_bytes)

    def split(self, parts: int) -> list[CopyPlan]:
        """Cut the plan into at most ``parts`` plans of nearly equal size."""
        parts = min(parts, self.size_bytes)
        cuts = np.array([self.size_bytes * part // parts for part in range(1, parts)], np.int64)
        begins = self.lengths_bytes.cumsum() - self.lengths_bytes
        run = begins.searchsorted(cuts, side="right") - 1
        whole = self._cut(run, cuts - begins[run])
        firsts = (whole.lengths_bytes.cumsum().searchsorted(cuts) + 1).tolist()
        return whole._parts([0, *firsts])

    def in_pieces(self, runs: int) -> list[CopyPlan]:
        return self._parts(range(0, self.runs, runs))

    def _parts(self, firsts: Sequence[int]) -> list[CopyPlan]:
        """Divide the plan. Each of the ``firsts`` is the index of a part's first run."""
        return [
            CopyPlan(self.device[first:end], self.host[first:end], self.lengths_bytes[first:end])
            for first, end in pairwise([*firsts, self.runs])
        ]

    def cut_at(self, addresses: Int64s) -> CopyPlan:
        run = self.host.searchsorted(addresses, side="right") - 1
        return self._cut(run, addresses - self.host[run])

    def _cut(self, run: Int64s, skipped: Int64s) -> CopyPlan:
        """Cut the runs at indices ``run`` after ``skipped`` bytes; ignore cuts at a run's edge."""
        inside = (skipped > 0) & (skipped < self.lengths_bytes[run])
        if not inside.any():
            return self
        run, skipped = run[inside], skipped[inside]
        begins = self.lengths_bytes.cumsum() - self.lengths_bytes
        device = np.insert(self.device, run + 1, self.device[run] + skipped)
        host = np.insert(self.host, run + 1, self.host[run] + skipped)
        begins = np.insert(begins, run + 1, begins[run] + skipped)
        return CopyPlan(device, host, np.diff(begins, append=self.size_bytes))


@dataclass(frozen=True, eq=False)
class GroupShare:
    """The blocks of one group in a job, and their slots."""

    layout: GroupLayout
    blocks: Int64s  # ids of shape (chunks, blocks_per_chunk); -1 marks a block that the job omits
    hosts: Int64s  # for each chunk, the address of this worker's part of the slot; ascending

    @property
    def size_bytes(self) -> int:
        return int((self.blocks >= 0).sum()) * int(self.layout.lengths_bytes.sum())

    def most_runs(self) -> int:
        """Return an upper bound on the number of runs."""
        before, after = self.blocks[:, :-1], self.blocks[:, 1:]
        neighbours = int(((after - before == 1) & (before >= 0)).sum())
        layout = self.layout
        is_gapless = layout.strides_bytes == layout.lengths_bytes
        gapless = int((is_gapless & (layout.steps_bytes == layout.lengths_bytes)).sum())
        blocks = int((self.blocks >= 0).sum())
        return blocks * len(layout.lengths_bytes) - neighbours * gapless

    def runs(self) -> CopyPlan:
        """Return the fewest runs that copy these blocks, in the order of their host addresses."""
        layout = self.layout
        # With the axes in the order of chunk, segment and block, dense layouts need no sorting.
        blocks = self.blocks[:, None, :]
        device = layout.addresses[:, None] + blocks * layout.strides_bytes[:, None]
        columns = np.arange(layout.blocks_per_chunk)
        in_chunk = layout.offsets_bytes[:, None] + columns * layout.steps_bytes[:, None]
        host = self.hosts[:, None, None] + in_chunk
        lengths = np.empty_like(device)
        lengths[:] = layout.lengths_bytes[:, None]
        if (self.blocks >= 0).all():
            return _merge(device.ravel(), host.ravel(), lengths.ravel())
        there = np.broadcast_to(blocks >= 0, device.shape)
        return _merge(device[there], host[there], lengths[there])


@dataclass(frozen=True, eq=False)
class JobPlan:
    """A job's blocks and slots. All ids are in range, and no destinations overlap."""

    shares: Sequence[GroupShare]
    operation: Operation
    expedited: bool

    @property
    def size_bytes(self) -> int:
        return sum(share.size_bytes for share in self.shares)

    def runs(self) -> CopyPlan:
        return join([share.runs() for share in self.shares])


def share_of(
    layout: GroupLayout, host: HostLayout, block_ids: Int64s, first_block: int, slots: Int64s
) -> GroupShare:
    per_chunk = layout.blocks_per_chunk
    skipped = first_block % per_chunk
    row = np.full(len(slots) * per_chunk, -1, np.int64)
    row[skipped : skipped + len(block_ids)] = block_ids
    blocks = row.reshape(-1, per_chunk)
    if (slots[1:] < slots[:-1]).any():
        # Sort the slots by address, because a run can be merged only with the plan's next run.
        order = slots.argsort(kind="stable")
        blocks, slots = blocks[order], slots[order]
    return GroupShare(layout, blocks, host.address + slots * host.row_bytes)


def join(plans: Sequence[CopyPlan]) -> CopyPlan:
    """Join the plans of several groups into one plan, and merge adjacent runs."""
    if len(plans) == 1:
        return plans[0]
    return _merge(
        np.concatenate([plan.device for plan in plans]),
        np.concatenate([plan.host for plan in plans]),
        np.concatenate([plan.lengths_bytes for plan in plans]),
    )


def _merge(device: Int64s, host: Int64s, lengths: Int64s) -> CopyPlan:
    if (host[1:] < host[:-1]).any():
        order = host.argsort(kind="stable")
        device, host, lengths = device[order], host[order], lengths[order]
    begins_here = np.empty(len(lengths), np.bool_)
    begins_here[0] = True
    ends = device[:-1] + lengths[:-1], host[:-1] + lengths[:-1]
    begins_here[1:] = (device[1:] != ends[0]) | (host[1:] != ends[1])
    (begins,) = begins_here.nonzero()
    if len(begins) == len(lengths):
        return CopyPlan(device, host, lengths)
    return CopyPlan(device[begins], host[begins], np.add.reduceat(lengths, begins))
