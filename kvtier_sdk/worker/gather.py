"""Copies small pages together: a kernel packs a chunk's pages, and a single copy moves them.

A copy engine needs microseconds even for a short run. So before a store, a kernel packs a chunk's
pages into a *staging part* on the device, in the order of the slot. A load copies the slot into a
staging part, and the kernel then distributes the pages.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.planning import (
    PIECE_RUNS,
    CopyPlan,
    GroupLayout,
    GroupShare,
    Int64s,
    JobPlan,
    join,
)

_log = logging.getLogger("kvtier.worker")

#: Jobs with shorter average runs are gathered. Longer runs use the full link without a kernel.
MIN_DIRECT_RUN_BYTES = 128 * 1024
#: Jobs with fewer runs are not gathered, because the kernel costs as much as a few runs.
MIN_GATHERED_RUNS = 16
#: Jobs with fewer runs per slot are not gathered, because one copy would replace too few runs.
MIN_RUNS_PER_COPY = 4
#: Size of a staging part. Copying it over a link takes at least 0.3 ms, packing it much less.
PART_BYTES = 16 * 1024**2
#: Staging parts for each kind of job: the kernel uses one while a copy uses the other.
PARTS = 2
#: Size and alignment of the kernel's memory accesses.
_WORD_BYTES = 16

Enqueue: TypeAlias = Callable[[CopyPlan, Operation, torch.cuda.Stream], None]


class PageKernel:
    """The kernel that copies pages on a device. Creation fails if triton is not installed."""

    def __init__(self, device: torch.device) -> None:
        from kvtier_sdk.worker.kernel import launch

        self.has_failed = False  # true after a failed launch, which ends the use of the kernel
        self._launch = launch
        self._device = device
        self._uploads = torch.cuda.Stream(device, priority=-1)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def upload(self, numbers: Int64s, stream: torch.cuda.Stream) -> torch.Tensor:
        """Copy numbers to the device for work on ``stream``, without waiting for the stream."""
        # Do not pin the numbers, because pinning may wait for the engine's computation. An unpinned
        # copy has read the numbers when it returns, so the caller may change them.
        with torch.cuda.stream(self._uploads):
            found = torch.from_numpy(numbers).to(self._device)
        stream.wait_stream(self._uploads)
        found.record_stream(stream)
        return found

    def start(
        self, stream: torch.cuda.Stream, *arguments: int | torch.Tensor, gather: bool
    ) -> None:
        """Compile the kernel if needed, and queue it. May raise any exception."""
        with torch.cuda.stream(stream):
            self._launch(*arguments, gather=gather)


@dataclass
class _Part:
    """A staging part. ``free`` is the event after its latest use; ``None`` before the first use."""

    memory: torch.Tensor
    free: torch.cuda.Event | None = None


class _Staging:
    """The kernels' stream and the staging parts for one kind of job. The parts are used in turn."""

    def __init__(self, kernel: PageKernel, priority: int) -> None:
        self.kernels = torch.cuda.Stream(priority=priority)
        self.parts = itertools.cycle([_Part(kernel.allocate(PART_BYTES)) for _ in range(PARTS)])


class _Band(NamedTuple):
    """Consecutive segments of a chunk that together fit into a staging part."""

    segments: slice
    begin_bytes: int
    size_bytes: int


class Gatherer:
    """Cuts jobs into pieces, each small enough for a staging part."""

    def __init__(
        self, kernel: PageKernel, layouts: Sequence[GroupLayout], priorities: Sequence[int]
    ) -> None:
        stream = torch.cuda.Stream()
        self._kernel = kernel
        self._tables: dict[GroupLayout, torch.Tensor] = {}
        for layout in filter(_is_possible, layouts):
            words = [layout.lengths_bytes // 8, layout.offsets_bytes // 8]
            rows = np.stack([layout.addresses, layout.strides_bytes, *words], 1)
            self._tables[layout] = kernel.upload(rows, stream)
        table = next(iter(self._tables.values()))
        for gather in (True, False):
            # Compile the kernel now, with a launch that copies nothing.
            nowhere = kernel.allocate(16).data_ptr()
            kernel.start(stream, nowhere, table, table, 0, 0, 0, 0, 1, 0, gather=gather)
        stream.synchronize()
        self._staging = [_Staging(kernel, priority) for priority in priorities]

    @staticmethod
    def is_wanted(layouts: Sequence[GroupLayout]) -> bool:
        """Return true if a group has small pages that the kernel can gather."""
        return any(
            _is_possible(of) and of.lengths_bytes.mean() < MIN_DIRECT_RUN_BYTES for of in layouts
        )

    def suits(self, plan: JobPlan) -> bool:
        """Return true if the job has many short runs per slot, and its groups can be gathered."""
        runs = sum(share.most_runs() for share in plan.shares)
        slots = sum(len(share.hosts) for share in plan.shares)
        return (
            not self._kernel.has_failed
            and runs >= max(MIN_GATHERED_RUNS, MIN_RUNS_PER_COPY * slots)
            and plan.size_bytes < runs * MIN_DIRECT_RUN_BYTES
            and all(share.layout in self._tables for share in plan.shares)
        )

    def pieces(self, plan: JobPlan, lane: int) -> list[StagedPiece]:
        staging = self._staging[lane]

        @cache
        def block_ids() -> torch.Tensor:
            ids = np.concatenate([share.blocks.ravel() for share in plan.shares])
            return self._kernel.upload(ids, staging.kernels)

        found = []
        first_entry = 0
        for share in plan.shares:
            table = self._tables[share.layout]
            per_chunk = share.layout.blocks_per_chunk
            for band in _bands(share.layout):
                step = min(PIECE_RUNS, PART_BYTES // band.size_bytes)
                for first in range(0, len(share.blocks), step):
                    some = slice(first, first + step)
                    chunks = GroupShare(share.layout, share.blocks[some], share.hosts[some])
                    entry = first_entry + first * per_chunk
                    found.append(
                        StagedPiece(self._kernel, staging, block_ids, table, chunks, band, entry)
                    )
            first_entry += share.blocks.size
        return found


@dataclass(eq=False)
class StagedPiece:
    """The same band of several chunks of a group. One staging part has room for all these bands."""

    _kernel: PageKernel
    _staging: _Staging
    _block_ids: Callable[[], torch.Tensor]
    _table: torch.Tensor
    _share: GroupShare
    _band: _Band
    _first_entry: int

    def __post_init__(self) -> None:
        block_bytes = int(self._share.layout.lengths_bytes[self._band.segments].sum())
        self.size_bytes = int((self._share.blocks >= 0).sum()) * block_bytes
        self.runs = len(self._share.blocks)

    def ends(
        self, operation: Operation, copies: torch.cuda.Stream
    ) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams on which the piece's work begins and ends."""
        kernels = self._staging.kernels
        return (kernels, copies) if operation is Operation.STORE else (copies, kernels)

    def queue(self, operation: Operation, copies: torch.cuda.Stream, enqueue: Enqueue) -> None:
        """Queue the kernel and the copies, which wait for the previous use of the staging part."""
        part = next(self._staging.parts)
        store = operation is Operation.STORE
        first, last = self.ends(operation, copies)

        def copy() -> None:
            # A store computes the runs here, while the kernel is running.
            enqueue(self._runs(part), operation, copies)

        launch = partial(self._launch, part, gather=store)
        begin, end = (launch, copy) if store else (copy, launch)
        if part.free is not None:
            first.wait_event(part.free)
        try:
            begin()
        finally:
            # Order the streams even after a failure, because ``last`` records the end of the copy.
            last.wait_event(first.record_event())
        try:
            end()
        finally:
            part.free = last.record_event()

    def _launch(self, part: _Part, *, gather: bool) -> None:
        segments = self._band.segments
        block_ids = self._block_ids()
        try:
            self._kernel.start(
                self._staging.kernels,
                part.memory.data_ptr(),
                block_ids,
                self._table,
                self._first_entry,
                self._share.blocks.size,
                segments.start,
                segments.stop - segments.start,
                self._share.layout.blocks_per_chunk,
                self._band.size_bytes // 8,
                gather=gather,
            )
        except Exception as raised:  # triton's errors have no common base class
            self._kernel.has_failed = True
            _log.warning("pages are copied one by one from now on: the kernel failed: %s", raised)
            raise KVTierError(f"the kernel that gathers pages failed: {raised}") from raised

    def _runs(self, part: _Part) -> CopyPlan:
        """Return one run for each whole chunk, and several runs for each incomplete chunk."""
        band, layout = self._band, self._share.layout
        begins = part.memory.data_ptr() + np.arange(len(self._share.blocks)) * band.size_bytes
        there = self._share.blocks >= 0
        whole = there.all(1)
        hosts = self._share.hosts + band.begin_bytes
        plans = [CopyPlan(begins[whole], hosts[whole], np.full(whole.sum(), band.size_bytes))]
        for chunk in np.flatnonzero(~whole):
            # The job omits some blocks of this chunk, so make a run for each segment.
            lengths = layout.lengths_bytes[band.segments]
            in_band = layout.offsets_bytes[band.segments] - band.begin_bytes
            in_band = in_band + int(there[chunk].argmax()) * lengths
            blocks = int(there[chunk].sum())
            plans.append(
                CopyPlan(begins[chunk] + in_band, hosts[chunk] + in_band, lengths * blocks)
            )
        return join(plans)


def _bands(layout: GroupLayout) -> Iterator[_Band]:
    ends = layout.offsets_bytes + layout.lengths_bytes * layout.blocks_per_chunk
    first = 0
    while first < len(ends):
        begin = int(layout.offsets_bytes[first])
        after = int(ends.searchsorted(begin + PART_BYTES, side="right"))
        yield _Band(slice(first, after), begin, int(ends[after - 1]) - begin)
        first = after


def _is_possible(layout: GroupLayout) -> bool:
    """Return true if pages are aligned and dense, and each segment of a chunk fits into a part."""
    numbers = np.concatenate([layout.addresses, layout.strides_bytes, layout.lengths_bytes])
    longest_bytes = int(layout.lengths_bytes.max()) * layout.blocks_per_chunk
    fits = not (numbers % _WORD_BYTES).any() and longest_bytes <= PART_BYTES
    return fits and layout.is_dense
