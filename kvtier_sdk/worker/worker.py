"""The worker, which copies between a device's blocks and a pool's slots."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.device import Copy, Device, StreamOrEvent
from kvtier_sdk.worker.geometry import DeviceBlocks, Indices, KVGroup, host_layout
from kvtier_sdk.worker.planning import Int64s, JobPlan, share_of

_log = logging.getLogger("kvtier.worker")

#: Time limit at the process's exit for a worker that was dropped without ``shutdown``.
_EXIT_WAIT_S = 5.0


@dataclass(frozen=True)
class CopyResult:
    """The result of a job.

    Attributes:
        job_id: the submitted id.
        operation: ``STORE`` or ``LOAD``.
        success: true if the whole job was copied. After a failure, the content of the destinations
            is undefined.
        size_bytes: the whole job's size, even after a failure.
        duration_s: seconds from the first byte to the last, excluding the time in a queue.
        error: the reason for a failure; ``None`` after a success.
    """

    job_id: int
    operation: Operation
    success: bool
    size_bytes: int
    duration_s: float
    error: str | None = None


@dataclass(eq=False)
class _Job:
    job_id: int
    operation: Operation
    size_bytes: int
    #: The copy, once it has started. A job without blocks has no copy, and ends immediately.
    started: Future[Copy | None] = field(default_factory=Future)

    def done(self) -> bool:
        return self.started.done() and ((copy := self.started.result()) is None or copy.done())

    def wait(self) -> None:
        if (copy := self.started.result()) is not None:
            copy.wait()

    def result(self) -> CopyResult:
        copy = self.started.result()
        error, duration_s = (None, 0.0) if copy is None else copy.outcome()
        success = error is None
        return CopyResult(self.job_id, self.operation, success, self.size_bytes, duration_s, error)


class OffloadWorker(contextlib.AbstractContextManager["OffloadWorker"]):
    """A worker that copies blocks to slots and back, in the background.

    A job has ended once ``get_finished`` has reported it or a ``wait`` for it has returned. After
    that, the worker does not access the job's blocks and slots, even if the job failed. Until then,
    the caller must not write the blocks and slots, nor read the destinations, which contain a
    mixture of old and new bytes. Jobs of one direction begin in the order of submission, but
    expedited loads overtake other loads. Loads overtake stores. Jobs may end in any order. Any
    thread may call any method.

    Args:
        groups: the KV-cache groups in the order of their indices, all on one device.
        host: the slots, as bytes of shape (slots, part) such as ``HostPool.part`` returns. The
            worker keeps the memory alive. Rows may have gaps between them. A worker with read-only
            memory can only load. In a replicated pool, only the first worker can store.
        device: the device that copies the bytes; the worker closes it. By default, the worker
            creates a device that fits the tensors.

    Raises:
        ConfigError: the groups or the memory are unsuitable, a chunk is longer than a row of
            ``host``, or no device supports these tensors.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        host: torch.Tensor | NDArray[np.uint8],
        *,
        device: Device | None = None,
    ) -> None:
        if not groups:
            raise ConfigError("a worker needs at least one KV-cache group")
        self._host = host_layout(host)
        self._layouts = [group.layout() for group in groups]
        for index, layout in enumerate(self._layouts):
            if layout.chunk_bytes > self._host.part_bytes:
                raise ConfigError(
                    f"a chunk of KV-cache group {index} has {format_bytes(layout.chunk_bytes)}, a "
                    f"part of a slot only {format_bytes(self._host.part_bytes)}: use fewer "
                    "blocks_per_chunk or larger slots"
                )
        self._jobs: dict[int, _Job] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._device = device or _open_device(groups)
        try:
            self._device.register(self._host, self._layouts)
        except BaseException:
            self._device.close()
            raise
        # Plans contain only addresses, so the finalizer must keep the memory alive.
        self._drop = weakref.finalize(self, _end_dropped, self._device, self._jobs, (groups, host))
        # At the process's exit, do not wait for workers that were never dropped.
        self._drop.atexit = False

    def submit_store(
        self,
        job_id: int,
        device_blocks: DeviceBlocks | Indices,
        slots: Indices,
        *,
        after: StreamOrEvent | None = None,
    ) -> None:
        """Start copying blocks into slots in the background.

        Args:
            job_id: the job's id, different from the ids of all unreported jobs.
            device_blocks: the source blocks. Pass plain ids if there is only one group and the
                first block is the first of a chunk.
            slots: distinct destinations, one for each chunk that the blocks touch, ordered by
                group. If the job has only some blocks of a chunk, only these blocks are written.
            after: the stream that computes the blocks, or an event recorded on that stream. The
                copy begins after all work queued on the stream so far, or after the event. Do not
                record the event again before the job has ended. An accelerator requires this
                argument, because a copy might otherwise read unfinished blocks; a CPU ignores it.

        Raises:
            ValueError: ids, slots or counts do not fit the geometry, or ``after`` is missing; no
                byte was copied.
            KVTierError: the worker is shut down, or its host memory is read-only.
        """
        if not self._host.writable:
            raise KVTierError("this worker cannot store: its host memory is read-only")
        self._submit(job_id, self._plan(Operation.STORE, device_blocks, slots), after)

    def submit_load(
        self,
        job_id: int,
        device_blocks: DeviceBlocks | Indices,
        slots: Indices,
        *,
        expedited: bool = False,
        after: StreamOrEvent | None = None,
    ) -> None:
        """Start copying slots into blocks in the background.

        ``job_id`` and the errors are as for :meth:`submit_store`.

        Args:
            device_blocks: the destinations, as for :meth:`submit_store`, distinct in each group.
            slots: the sources, one for each chunk that the blocks touch, ordered by group.
            expedited: true to let this load overtake other loads, even a large load that has begun.
            after: as for :meth:`submit_store`, for the stream that may still use the blocks.
        """
        plan = self._plan(Operation.LOAD, device_blocks, slots, expedited)
        self._submit(job_id, plan, after)

    def get_finished(self) -> list[CopyResult]:
        """Return the results of the jobs that have ended since the last call. Never blocks."""
        with self._lock:
            ended = [job for job in self._jobs.values() if job.done()]
            for job in ended:
                del self._jobs[job.job_id]
        results = [job.result() for job in ended]
        for result in results:
            if result.error is not None:
                _log.error(
                    "%s of job %s failed: %s", result.operation.value, result.job_id, result.error
                )
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Block until the jobs ``job_ids`` have ended. ``get_finished`` still reports them.

        The method ignores ids of jobs that were reported or never submitted. On a CPU, the calling
        thread copies the parts that no other thread has begun.
        """
        with self._lock:
            jobs = [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]
        for job in jobs:
            job.wait()

    def shutdown(self) -> None:
        """Wait for all jobs, and release threads, streams, pinned memory, slots and KV tensors.

        ``get_finished`` still reports the jobs that have ended. A second call does nothing. If a
        worker is dropped without this call, a background thread does the same.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            jobs = list(self._jobs)
        self.wait(jobs)
        self._device.close()
        # Detaching the finalizer also drops the finalizer's references to the memory.
        self._drop.detach()

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def _submit(self, job_id: int, plan: JobPlan, after: StreamOrEvent | None) -> None:
        job = _Job(job_id, plan.operation, plan.size_bytes)
        with self._lock:
            if self._closed:
                raise KVTierError("the offload worker is shut down")
            if job_id in self._jobs:
                raise ValueError(f"job {job_id} has not been reported yet")
            self._jobs[job_id] = job
        # Do not hold the lock here, because the driver may take long to start a copy.
        copy = None
        try:
            if plan.shares:
                copy = self._device.start(plan, after)
        except BaseException:
            with self._lock:
                del self._jobs[job_id]
            raise
        finally:
            job.started.set_result(copy)

    def _plan(
        self,
        operation: Operation,
        blocks: DeviceBlocks | Indices,
        slots: Indices,
        expedited: bool = False,
    ) -> JobPlan:
        if not isinstance(blocks, DeviceBlocks):
            blocks = DeviceBlocks(blocks)
        sizes = self._per_group("group_sizes", blocks.group_sizes, default=len(blocks.block_ids))
        firsts = self._per_group("first_blocks", blocks.first_blocks, default=0)
        block_ids = _indices("block ids", blocks.block_ids)
        slot_ids = _indices("slots", slots)
        _check_range("slots", slot_ids, self._host.slots)
        wanted = [
            layout.slots_for(size, first) if size else 0
            for layout, size, first in zip(self._layouts, sizes, firsts, strict=True)
        ]
        if sum(sizes) != len(block_ids):
            raise ValueError(f"{len(block_ids)} block ids, but group_sizes add up to {sum(sizes)}")
        if sum(wanted) != len(slot_ids):
            raise ValueError(f"{len(slot_ids)} slots, but the blocks touch {sum(wanted)} chunks")
        if operation is Operation.STORE and _has_duplicates(slot_ids):
            raise ValueError("a store names a slot twice")

        shares = []
        for index, layout in enumerate(self._layouts):
            ids, block_ids = block_ids[: sizes[index]], block_ids[sizes[index] :]
            some, slot_ids = slot_ids[: wanted[index]], slot_ids[wanted[index] :]
            if len(ids):
                _check_range(f"block ids of group {index}", ids, layout.blocks)
                if operation is Operation.LOAD and _has_duplicates(ids):
                    raise ValueError("a load names a block twice")
                shares.append(share_of(layout, self._host, ids, firsts[index], some))
        return JobPlan(shares, operation, expedited)

    def _per_group(self, name: str, values: Sequence[int] | None, *, default: int) -> list[int]:
        if values is None:
            if len(self._layouts) > 1 and default:
                raise ValueError(f"{name} is needed: there are {len(self._layouts)} groups")
            return [default] * len(self._layouts)
        if len(values) != len(self._layouts):
            raise ValueError(f"{name} has {len(values)} groups; there are {len(self._layouts)}")
        if any(value < 0 for value in values):
            raise ValueError(f"{name} has a negative number: {list(values)}")
        return [int(value) for value in values]


def _end_dropped(device: Device, jobs: dict[int, _Job], memory: object) -> None:
    """Close the device in a new thread: a copying thread may call this, and cannot join itself."""
    _log.warning("an offload worker was dropped without a call of shutdown()")
    end = threading.Thread(
        target=_end, args=(device, jobs, memory), name="kvtier-dropped-worker", daemon=True
    )
    end.start()
    # At exit, wait for the thread, because freeing a tensor during the interpreter's exit would
    # abort the process. Limit the wait, because a stuck stream would block the thread forever.
    atexit.register(end.join, _EXIT_WAIT_S)


def _end(device: Device, jobs: dict[int, _Job], memory: object) -> None:
    """Wait for the jobs, and close the device. ``memory`` keeps tensors and slots alive."""
    for job in jobs.values():
        job.wait()
    device.close()


def _open_device(groups: Sequence[KVGroup]) -> Device:
    devices = {tensor.tensor.device for group in groups for tensor in group.tensors}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ConfigError(f"the KV-cache groups of a worker must be on one device, not on {names}")
    device = devices.pop()
    if device.type == "cpu":
        from kvtier_sdk.worker.cpu import CPUDevice

        return CPUDevice()
    if device.type == "cuda":
        from kvtier_sdk.worker.cuda import CUDADevice

        return CUDADevice(device)
    raise ConfigError(
        f"there is no worker for tensors on {device.type!r}, only for 'cpu' and 'cuda'"
    )


def _indices(what: str, values: Indices) -> Int64s:
    array = np.asarray(values)
    if not array.size:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{what} must be a row of integers, not {array.dtype} of {array.shape}")
    return array.astype(np.int64)


def _check_range(what: str, ids: Int64s, limit: int) -> None:
    # Compare unsigned numbers, because a negative id then exceeds any limit.
    if (ids.view(np.uint64) >= limit).any():
        raise ValueError(f"{what} must be from 0 to {limit - 1}, not {ids.min()} to {ids.max()}")


def _has_duplicates(ids: Int64s) -> bool:
    ascending = np.sort(ids)
    return bool((ascending[1:] == ascending[:-1]).any())
