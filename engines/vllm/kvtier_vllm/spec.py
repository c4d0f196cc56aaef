"""kvtier's manager and host pool under vLLM's offloading connector."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from kvtier_sdk import (
    ConfigError,
    HostPool,
    Namespace,
    PoolLayout,
    SystemClock,
    TierSpec,
    format_bytes,
)
from kvtier_sdk.engine import (
    EngineSlots,
    OperatorServices,
    TieringManager,
    open_manager,
    pool_size_bytes,
    validate_options,
)
from kvtier_vllm import compat
from kvtier_vllm.copies import KVTierOffloadingWorker, refuse_uncertified
from kvtier_vllm.engine_log import join_engine_log
from kvtier_vllm.identity import Identity, slot_layout
from kvtier_vllm.manager import KVTierOffloadingManager
from kvtier_vllm.metrics import metric_definitions
from kvtier_vllm.options import EXTRA_CONFIG, SpecOptions
from kvtier_vllm.region import JoinedRegion, refuse_absent

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        OffloadingManager,
        OffloadingMetricMetadata,
        OffloadingWorker,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig


class KVTierOffloadingSpec(OffloadingSpec):  # type: ignore[misc]
    """kvtier's offloading spec, which vLLM instantiates in the scheduler and in each worker.

    Args:
        config: vLLM's description of the engine.

    Raises:
        ConfigError: an option is wrong.
        BackendError: a backend cannot be found or loaded.
    """

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        join_engine_log()
        compat.warn_if_untried()
        self._options = validate_options(SpecOptions, config.extra_config, EXTRA_CONFIG)
        self.replicated_layout = config.replicated_layout
        self._theirs = self._uses_their_copies()
        self._layout = self._pool_layout()
        self._manager: KVTierOffloadingManager | None = None
        self._worker: OffloadingWorker | None = None

    def get_manager(self) -> OffloadingManager:
        if self._manager is None:
            compat.tell_stops()
            compat.tell_traces()
            tiers = self._options.read_tiers()
            pool = self._scheduler_pool()
            try:
                self._manager = self._make_manager(pool, tiers)
            except BaseException:
                pool.close()
                raise
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            canonical = self.config.canonical_layout
            if canonical:
                refuse_uncertified(kv_caches, self.config)
            if self._theirs:
                self._worker = self._their_worker(kv_caches)
            else:
                rank = self.config.parallel.rank
                pool = HostPool.join(self.config.engine_id, self._layout, worker=rank)
                slots = pool.part(0 if canonical else rank)
                self._worker = KVTierOffloadingWorker(
                    kv_caches, slots, self.blocks_per_chunk, pool.close, canonical=canonical
                )
        return self._worker

    def _uses_their_copies(self) -> bool:
        on_cpu = bool(current_platform.is_cpu())
        copies = self._options.copies
        if copies == "vllm" and on_cpu:
            raise ConfigError(
                "kv_connector_extra_config: option 'copies' is 'vllm', which does not copy on a "
                "CPU; allowed here: auto, kvtier"
            )
        return copies == "vllm" or (copies == "auto" and not on_cpu)

    def _pool_layout(self) -> PoolLayout:
        config = self.config
        part_bytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        workers, has_one_part = config.parallel.world_size, self.replicated_layout
        if config.canonical_layout and not self._theirs and not has_one_part:
            # All workers write into one part, because their heads interleave.
            part_bytes, has_one_part = part_bytes * workers, True
        one = PoolLayout(1, max(1, part_bytes), workers, replicated=has_one_part)
        size_bytes = pool_size_bytes(self._options)
        slots = size_bytes // one.row_bytes
        if not slots:
            raise ConfigError(
                f"kv_connector_extra_config: option 'cpu_bytes_to_use' is "
                f"{format_bytes(size_bytes)}, and one chunk takes {format_bytes(one.row_bytes)}; "
                "raise it to at least that"
            )
        return PoolLayout(slots, one.part_bytes, one.workers, one.replicated)

    def _make_manager(
        self, pool: HostPool | EngineSlots, tiers: Sequence[TierSpec]
    ) -> KVTierOffloadingManager:
        rank = self.config.parallel.data_parallel_index
        config = self._options.config.for_rank(rank)
        clock = SystemClock()
        services = OperatorServices(config, clock, pool.chunk_bytes, rank=rank)
        identity = Identity(
            self.config,
            chunk_bytes=pool.chunk_bytes,
            slot_layout=slot_layout(self.config, ours=not self._theirs),
            declared=self._options,
        )

        def make(
            namespace: Namespace, tiers: Sequence[TierSpec], engine_waits: bool
        ) -> AbstractContextManager[TieringManager]:
            events = self.kv_events_config.enable_kv_cache_events
            used = config.model_copy(update={"tiers": tuple(tiers)})
            return open_manager(
                pool,
                used,
                namespace,
                clock=clock,
                events=events,
                engine_waits=engine_waits,
                services=services,
            )

        closing = ExitStack()
        closing.callback(pool.close)
        closing.callback(services.close)
        try:
            manager = KVTierOffloadingManager(
                make,
                tiers,
                identity,
                on_shutdown=closing.close,
                # One step for each stage of the pipeline, and one for asynchronous scheduling.
                steps_in_flight=self.config.parallel.pp_size + 1,
                clock=clock,
            )
        except BaseException:
            services.close()
            raise
        if services.publisher is not None and config.events_tokens:
            closing.callback(compat.tell_blocks(self.kv_events_config, manager.describe))
        return manager

    def _scheduler_pool(self) -> HostPool | EngineSlots:
        joined: HostPool | JoinedRegion = (
            self._region(None)
            if self._theirs
            else HostPool.join(self.config.engine_id, self._layout)
        )
        try:
            refuse_absent(joined.absent())
            if isinstance(joined, HostPool):
                return joined
            return EngineSlots("vLLM", joined.create_kv_memoryview(), joined.close)
        except BaseException:
            joined.close()
            raise

    def _their_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        region = self._region(self.config.parallel.rank)
        try:
            return CPUOffloadingWorker(
                kv_caches=kv_caches,
                blocks_per_chunk=self.blocks_per_chunk,
                num_cpu_chunks=self._layout.slots,
                mmap_region=region,
                canonical_layout=self.config.canonical_layout,
            )
        except BaseException:
            region.cleanup()
            raise

    def _region(self, worker: int | None) -> JoinedRegion:
        """Map vLLM's shared memory with the layout of vLLM's worker."""
        return JoinedRegion(
            self.config.engine_id,
            self._layout.workers,
            worker,
            num_chunks=self._layout.slots,
            rank=0 if worker is not None and self.replicated_layout else worker,
            kv_bytes_per_chunk=self._layout.row_bytes,
            cpu_page_size=self._layout.part_bytes,
        )
