"""vLLM's tiering where the device is a CPU, which vLLM itself refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.integrations.vllm.copies import worker_over_region
from kvtier_sdk.integrations.vllm.identity import OUR_SLOTS, THEIR_SLOTS

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker


class KVTierCPUTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """``TieringOffloadingSpec`` with a worker for CPU-only engines; elsewhere it is the same."""

    _worker: OffloadingWorker | None

    @property
    def slot_layout(self) -> str:
        """Whose worker fills the slots; our tiers ask for it."""
        return OUR_SLOTS if current_platform.is_cpu() else THEIR_SLOTS

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if not current_platform.is_cpu():
            return super().get_worker(kv_caches)
        if self.config.canonical_layout:
            raise ConfigError(
                "kv_connector_extra_config: option 'canonical_layout' is not available on a CPU"
            )
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = worker_over_region(kv_caches, region, self.blocks_per_chunk)
        return self._worker
