"""vLLM's tiering for engines on a CPU, where vLLM's own spec refuses to run."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_vllm.copies import KVTierOffloadingWorker, refuse_uncertified
from kvtier_vllm.identity import slot_layout
from kvtier_vllm.region import JoinedRegion, enter, refuse_absent

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingWorker


class KVTierCPUTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """``TieringOffloadingSpec`` with a worker for CPU-only engines; unchanged on other devices."""

    _manager: OffloadingManager | None
    _worker: OffloadingWorker | None

    @property
    def slot_layout(self) -> str:
        """The slot layout of this device's worker, which is recorded in the namespace."""
        return slot_layout(self.config, ours=current_platform.is_cpu())

    def get_manager(self) -> OffloadingManager:
        if self._manager is None and current_platform.is_cpu():
            manager = super().get_manager()
            try:
                # Close the lease after the check. The scheduler stays a member without it, because
                # vLLM's region keeps the file open.
                lease = enter(self._scheduler_mmap, self.config.parallel.world_size, None)
                with closing(lease):
                    refuse_absent(lease.absent())
            except BaseException:
                self._manager = None
                manager.shutdown()
                raise
        return super().get_manager()

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            canonical = self.config.canonical_layout
            if canonical:
                refuse_uncertified(kv_caches, self.config)
            rank = self.config.parallel.rank
            region = JoinedRegion(
                self.config.engine_id,
                self.config.parallel.world_size,
                rank,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            if canonical:
                slots = region.base_tensor.view(region.num_chunks, -1)
            else:
                page_bytes = sum(cache.page_size_bytes for cache in kv_caches.tensors)
                slots = region.create_next_worker_view(page_bytes * self.blocks_per_chunk)
            self._worker = KVTierOffloadingWorker(
                kv_caches, slots, self.blocks_per_chunk, region.cleanup, canonical=canonical
            )
        return self._worker
