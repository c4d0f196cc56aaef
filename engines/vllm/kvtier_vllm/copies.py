"""Adapts kvtier's worker to vLLM's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvtier_sdk import HostPool
from kvtier_sdk.engine import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_vllm.compat import computation

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec


class KVTierOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """A worker that copies between vLLM's KV blocks and this worker's part of each slot.

    ``on_shutdown`` is called when ``shutdown`` has finished, or if the constructor raises.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slots: Any,
        blocks_per_chunk: int,
        on_shutdown: Callable[[], None],
    ) -> None:
        self._on_shutdown = on_shutdown
        try:
            self._worker = OffloadWorker(_groups(kv_caches, blocks_per_chunk), slots)
        except BaseException:
            on_shutdown()
            raise

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        self._worker.submit_store(
            job_id, _device_blocks(src_spec), dst_spec.block_ids, after=computation()
        )
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self._worker.submit_load(
            job_id,
            _device_blocks(dst_spec),
            src_spec.block_ids,
            expedited=expedited,
            after=computation(),
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        return [
            TransferResult(
                result.job_id,
                success=result.success,
                transfer_size=result.size_bytes,
                transfer_time=result.duration_s,
            )
            for result in self._worker.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        self._worker.wait(job_ids)

    def shutdown(self) -> None:
        self._worker.shutdown()
        self._on_shutdown()


def worker_over_region(
    kv_caches: CanonicalKVCaches, region: Any, blocks_per_chunk: int
) -> KVTierOffloadingWorker:
    page_bytes = sum(cache.page_size_bytes for cache in kv_caches.tensors)
    slots = region.create_next_worker_view(page_bytes * blocks_per_chunk)
    return KVTierOffloadingWorker(kv_caches, slots, blocks_per_chunk, region.cleanup)


def worker_over_pool(
    kv_caches: CanonicalKVCaches, pool: HostPool, blocks_per_chunk: int
) -> KVTierOffloadingWorker:
    slots = pool.part(pool.worker or 0)
    return KVTierOffloadingWorker(kv_caches, slots, blocks_per_chunk, pool.close)


def _groups(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[KVGroup]:
    tensors = [cache.tensor for cache in kv_caches.tensors]
    return [
        # A page may be padded on the device; the padding is not copied.
        KVGroup(
            [KVTensor(tensors[ref.tensor_idx][:, : ref.page_size_bytes]) for ref in refs],
            blocks_per_chunk,
        )
        for refs in kv_caches.group_data_refs
    ]


def _device_blocks(spec: GPULoadStoreSpec) -> DeviceBlocks:
    return DeviceBlocks(spec.block_ids, spec.group_sizes, spec.block_indices)
