"""vLLM's slots are as large as the largest chunk of one KV-cache group, not of all groups."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as connector
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        build_offloading_config,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    try:
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:  # vLLM 0.32
        from vllm.v1.core import kv_cache_utils as planning

LAYOUT = KVCacheLayout.LBHNC
BLOCKS = 2


def full(block_tokens: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=block_tokens, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )


SLIDING = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=1024
)


STATE = MambaSpec(
    block_size=128,
    shapes=((30_000,),),
    dtypes=(torch.bfloat16,),
    page_size_padded=full(128).page_size_bytes,
    mamba_cache_mode="align",
)


def one_in(every: int, layers: int, other: Any = SLIDING, block_tokens: int = 16) -> list[Any]:
    """Return the specs of a model in which one of ``every`` layers has full attention."""
    attention = full(block_tokens)
    return [attention if n % every == every - 1 else other for n in range(layers)]


#: The layers of a model, the layers in each of its groups, and the bytes of slots for a chunk of
#: each group beside the bytes of these chunks.
MODELS = {
    "one group": ([full()] * 8, [8], 1.0),
    "gpt-oss 20B": (one_in(2, 24), [12, 12], 1.0),
    "gpt-oss 20B with EAGLE": ([*one_in(2, 24), full()], [12, 13], 1.04),
    "eight groups": (one_in(8, 16), [2] * 8, 1.0),
    "Gemma 3 4B": (one_in(6, 34), [5, 5, 5, 5, 5, 4, 5], 1.03),
    "Gemma 3 27B": (one_in(6, 62), [9, 9, 9, 9, 8, 8, 10], 1.13),
    "Jamba 1.5 Mini": (one_in(8, 32, STATE, 128), [4] * 8, 1.08),
}


@pytest.mark.parametrize("model", MODELS)
def test_a_slot_has_room_for_the_largest_group(model: str) -> None:
    specs, layers, ratio = MODELS[model]
    slot_bytes, chunks = slot_and_chunks(specs, layers)
    assert slot_bytes == max(chunks)
    assert slot_bytes * len(chunks) <= (ratio + 0.005) * sum(chunks)


def slot_and_chunks(specs: list[Any], layers: list[int]) -> tuple[int, list[int]]:
    """Return what vLLM takes for a slot, and the bytes that a worker copies for each group."""
    config = vllm_config()
    groups = planning.get_kv_cache_groups(config, {f"{n}.attn": s for n, s in enumerate(specs)})
    assert sorted(len(group.layer_names) for group in groups) == sorted(layers)
    some_bytes = BLOCKS * planning._get_kv_cache_bytes_per_block(groups, LAYOUT)
    cache = planning.get_kv_cache_config_from_groups(config, groups, some_bytes)
    registered: list[Any] = []
    spec = SimpleNamespace(get_worker=registered.append, replicated_layout=False)
    worker = connector.OffloadingConnectorWorker(spec, config, cache)
    worker.register_kv_caches(allocate_kv_cache(cache, torch.device("cpu"), LAYOUT))
    chunks = [sum(ref.page_size_bytes for ref in refs) for refs in registered[0].group_data_refs]
    return build_offloading_config(config, cache).worker_kv_bytes_per_block, chunks


def vllm_config() -> Any:
    """Return the settings that vLLM reads here; the next release's files cannot make their own."""
    return SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            block_size=16,
            cache_dtype="auto",
            enable_prefix_caching=True,
            get_resolved_kv_cache_layout=lambda: LAYOUT,
            kv_cache_layout=LAYOUT.name,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            prefix_match_unit=None,
        ),
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(engine_id="test", kv_connector_extra_config={}),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            get_total_num_kv_heads=lambda: 2,
            max_model_len=2048,
            model="test",
            use_mla=False,
        ),
        parallel_config=SimpleNamespace(
            cp_kv_cache_interleave_size=1,
            data_parallel_index=0,
            data_parallel_rank_local=None,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            distributed_executor_backend=None,
            nnodes_within_dp=1,
            pipeline_parallel_size=1,
            prefill_context_parallel_size=1,
            rank=0,
            tensor_parallel_size=1,
            world_size=1,
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        speculative_config=None,
        use_v2_model_runner=False,
    )
