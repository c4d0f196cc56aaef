"""Builds vLLM configurations as a spec receives them, without an engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

KEYS = [make_offload_key(bytes([n]) * 32, 0) for n in range(4)]
CHUNK_BYTES = 8192
#: A model directory with a dummy config and dummy weights.
MODEL = Path(__file__).with_name("model")


def make_config(tiers: list[Any], **extra: Any) -> OffloadingConfig:
    names = [field.name for field in fields(OffloadingParallelConfig)]
    parallel: dict[str, Any] = {name: int(name.endswith("size")) for name in names}
    parallel["is_parallelism_agnostic"] = False
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=True,
        extra_config={
            "spec_name": "KVTierOffloadingSpec",
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": "64KiB",
            "secondary_tiers": tiers,
            **extra,
        },
        engine_id=f"test-{id(tiers)}",
        model=OffloadingModelConfig(name=str(MODEL), dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(**parallel),
        kv_cache_layout="NHD",
    )


@contextmanager
def opened_manager(config: OffloadingConfig) -> Iterator[Any]:
    with joined_worker(config):
        manager = OffloadingSpecFactory.create_spec(config).get_manager()
        try:
            yield manager
        finally:
            manager.shutdown()


@contextmanager
def joined_worker(config: OffloadingConfig) -> Iterator[Any]:
    tensor = torch.zeros(4, CHUNK_BYTES, dtype=torch.int8)
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, CHUNK_BYTES)], [[CanonicalKVCacheRef(0, CHUNK_BYTES)]]
    )
    worker = OffloadingSpecFactory.create_spec(config).get_worker(caches)
    try:
        yield worker
    finally:
        worker.shutdown()
