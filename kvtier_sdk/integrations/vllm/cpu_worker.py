"""Copies between KV blocks and slots where both lie in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult

from kvtier_sdk.clock import Clock, SystemClock
from kvtier_sdk.pool import HostPool

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, LoadStoreSpec

_THREADS = 2


class _Page(NamedTuple):
    """Where one block of one tensor lies, on the device and in the slots."""

    tensor: int
    size_bytes: int


class CPUWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies on a small pool of threads; numpy copies outside the interpreter lock.

    Args:
        kv_caches: the device's tensors, in host memory.
        slots: for each tensor, an array of shape (slots, bytes of a chunk).
        blocks_per_chunk: how many blocks make a chunk.
        close: called last, when no copy runs any more.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slots: Sequence[np.ndarray[Any, np.dtype[np.uint8]]],
        blocks_per_chunk: int,
        close: Any,
        clock: Clock | None = None,
    ) -> None:
        self._device = [cache.tensor.numpy().view(np.uint8) for cache in kv_caches.tensors]
        self._slots = list(slots)
        self._pitch = [cache.page_size_bytes for cache in kv_caches.tensors]
        self._pages = [
            [_Page(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._blocks_per_chunk = blocks_per_chunk
        self._close = close
        self._clock = clock or SystemClock()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvtier-copy")
        self._running: dict[int, Future[TransferResult]] = {}

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        return self._submit(job_id, src_spec, dst_spec.block_ids, to_slots=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        return self._submit(job_id, dst_spec, src_spec.block_ids, to_slots=False)

    def get_finished(self) -> list[TransferResult]:
        done = [job_id for job_id, future in self._running.items() if future.done()]
        return [self._running.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._running[job_id] for job_id in job_ids if job_id in self._running])

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)
        self._device, self._slots = [], []
        self._close()

    def _submit(
        self, job_id: int, blocks: GPULoadStoreSpec, slots: Sequence[int], *, to_slots: bool
    ) -> bool:
        self._running[job_id] = self._pool.submit(self._copy, job_id, blocks, slots, to_slots)
        return True

    def _copy(
        self, job_id: int, blocks: GPULoadStoreSpec, slots: Sequence[int], to_slots: bool
    ) -> TransferResult:
        started_s = self._clock.now_s()
        copied = 0
        for group, block, slot, place in self._places(blocks, slots):
            for tensor, size in self._pages[group]:
                start = place * self._pitch[tensor]
                page = self._device[tensor][block, :size]
                part = self._slots[tensor][slot, start : start + size]
                np.copyto(*((part, page) if to_slots else (page, part)))
                copied += size
        return TransferResult(
            job_id,
            success=True,
            transfer_size=copied,
            transfer_time=self._clock.now_s() - started_s,
        )

    def _places(
        self, blocks: GPULoadStoreSpec, slots: Sequence[int]
    ) -> Iterator[tuple[int, int, int, int]]:
        """Group, block, slot, and place in the slot of each block."""
        per_chunk = self._blocks_per_chunk
        next_block = next_slot = 0
        for group, count in enumerate(blocks.group_sizes):
            offset = blocks.block_indices[group] % per_chunk
            for n in range(count):
                chunk, place = divmod(offset + n, per_chunk)
                yield (
                    group,
                    int(blocks.block_ids[next_block + n]),
                    int(slots[next_slot + chunk]),
                    place,
                )
            next_block += count
            next_slot += -(-(offset + count) // per_chunk) if count else 0


def worker_over_region(
    kv_caches: CanonicalKVCaches, region: Any, blocks_per_chunk: int
) -> CPUWorker:
    """A worker over vLLM's shared region.

    Args:
        kv_caches: the device's tensors.
        region: this rank's mapping; the worker's from now on.
        blocks_per_chunk: how many blocks make a chunk.
    """
    slots = [
        region.create_next_worker_view(size_bytes).numpy().view(np.uint8)
        for size_bytes in _chunk_sizes(kv_caches, blocks_per_chunk)
    ]
    return CPUWorker(kv_caches, slots, blocks_per_chunk, region.cleanup)


def worker_over_pool(
    kv_caches: CanonicalKVCaches, pool: HostPool, blocks_per_chunk: int
) -> CPUWorker:
    """A worker over its part of a host pool.

    Args:
        kv_caches: the device's tensors.
        pool: mapped as this worker; the worker's from now on.
        blocks_per_chunk: how many blocks make a chunk.
    """
    part = pool.part(pool.worker or 0, "device copies")
    slots, start = [], 0
    for size_bytes in _chunk_sizes(kv_caches, blocks_per_chunk):
        slots.append(part[:, start : start + size_bytes])
        start += size_bytes
    return CPUWorker(kv_caches, slots, blocks_per_chunk, pool.close)


def _chunk_sizes(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[int]:
    """Bytes of a chunk in each tensor."""
    return [cache.page_size_bytes * blocks_per_chunk for cache in kv_caches.tensors]
