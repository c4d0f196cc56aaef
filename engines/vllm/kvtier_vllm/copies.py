"""Adapts kvtier's worker to vLLM's interface."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

from kvtier_sdk import ConfigError
from kvtier_sdk.engine import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_vllm.compat import computation

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCaches,
        CanonicalPageMapping,
        GPULoadStoreSpec,
        LoadStoreSpec,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig


class KVTierOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """A worker that copies between vLLM's KV blocks and this worker's part of each slot.

    With vLLM's canonical layout, each worker's part is the whole slot. ``on_shutdown`` is called at
    the end of ``shutdown``, or if the constructor raises.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slots: Any,
        blocks_per_chunk: int,
        on_shutdown: Callable[[], None],
        *,
        canonical: bool = False,
    ) -> None:
        self._on_shutdown = on_shutdown
        # If several workers hold the same bytes, only the first worker stores them.
        self._stores = not canonical or any(
            ref.mapping.writer_index == 0 for refs in kv_caches.group_data_refs for ref in refs
        )
        make_groups = _canonical_groups if canonical else _groups
        try:
            self._worker = OffloadWorker(make_groups(kv_caches, blocks_per_chunk), slots)
        except BaseException:
            on_shutdown()
            raise

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        blocks, slots = _device_blocks(src_spec), dst_spec.block_ids
        if not self._stores:
            # Submit an empty job, because vLLM waits until every worker has reported the job.
            blocks, slots = DeviceBlocks([], [0] * len(src_spec.group_sizes)), []
        self._worker.submit_store(job_id, blocks, slots, after=computation())
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


def refuse_uncertified(kv_caches: CanonicalKVCaches, config: OffloadingConfig) -> None:
    """Raise ``ConfigError`` if a layer's bytes are less portable than the namespace states."""
    portable = config.parallel.is_parallelism_agnostic
    mappings = [ref.mapping for refs in kv_caches.group_data_refs for ref in refs]
    if any(m is None or m.parallelism_agnostic < portable for m in mappings):
        raise ConfigError(
            "kv_connector_extra_config: option 'canonical_layout': vLLM has no canonical "
            "layout for this model's KV cache with this parallelism; remove it"
        )


def _groups(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[KVGroup]:
    tensors = [cache.tensor for cache in kv_caches.tensors]
    return [
        # Cut off the padding that a page may have on the device.
        KVGroup(
            [KVTensor(tensors[ref.tensor_idx][:, : ref.page_size_bytes]) for ref in refs],
            blocks_per_chunk,
        )
        for refs in kv_caches.group_data_refs
    ]


def _canonical_groups(kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> list[KVGroup]:
    """Return groups with one tensor for each page fragment, placed as in the canonical layout."""
    block_bytes = [0] * len(kv_caches.tensors)
    for ref in (ref for refs in kv_caches.group_data_refs for ref in refs):
        page_bytes = ref.mapping.canonical_page_size_bytes
        block_bytes[ref.tensor_idx] = max(block_bytes[ref.tensor_idx], page_bytes)
    begins = [0, *itertools.accumulate(size * blocks_per_chunk for size in block_bytes)]
    groups = []
    for refs in kv_caches.group_data_refs:
        tensors, places = [], []
        for ref in refs:
            index = ref.tensor_idx
            for local, canonical, size in _fragments(ref.mapping):
                tensors.append(KVTensor(kv_caches.tensors[index].tensor[:, local : local + size]))
                places.append((begins[index] + canonical, block_bytes[index]))
        groups.append(KVGroup(tensors, blocks_per_chunk, places))
    return groups


def _fragments(mapping: CanonicalPageMapping) -> Iterator[tuple[int, int, int]]:
    """Yield each fragment's offset in this worker's page, offset in the shared page, and size."""
    for run in mapping.runs:
        for n in range(run.num_fragments):
            local = run.local_offset + n * run.local_stride
            yield local, run.canonical_offset + n * run.canonical_stride, run.fragment_size


def _device_blocks(spec: GPULoadStoreSpec) -> DeviceBlocks:
    return DeviceBlocks(spec.block_ids, spec.group_sizes, spec.block_indices)
