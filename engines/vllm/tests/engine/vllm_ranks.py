"""An engine's workers and manager, made by vLLM's own code, with copies on the CPU."""

import ctypes
import functools
import itertools
import json
import uuid
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    MLAAttentionSpec,
    create_kv_cache_views,
)
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering import spec as tiering_spec
from vllm_platform import on_platform

from kvtier_vllm import spec as our_spec

try:
    from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    get_global_kv_cache_groups = None

LAYERS, BLOCK_TOKENS, HEADS = 2, 16, 8
#: Elements per head and token: key plus value, or MLA's latent vector.
WIDTH = {"llama": 64, "narrow values": 48, "deepseek": 96}
_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "narrow values": _LLAMA,
    "deepseek": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "kv_lora_rank": 64,
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
}
_jobs = itertools.count()
_HIT, _MISS = base.LookupResult.HIT, base.LookupResult.MISS


def _without_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's worker for GPUs copy between CPU tensors."""
    on_platform(monkeypatch, "cuda", "cuda")
    for spec in (our_spec, tiering_spec):
        monkeypatch.setattr(spec, "CPUOffloadingWorker", gpu_worker.CPUOffloadingWorker)
    nothing: Any = lambda *_: None  # noqa: E731
    stream = SimpleNamespace(wait_stream=nothing, wait_event=nothing)
    event = SimpleNamespace(
        record=nothing, synchronize=nothing, query=lambda: True, elapsed_time=lambda end: 1.0
    )
    for name, made in {"Stream": stream, "current_stream": stream, "stream": nullcontext()}.items():
        monkeypatch.setattr(type(current_platform), name, lambda *_, made=made: made, raising=False)
    monkeypatch.setattr(torch, "Event", lambda **_: event)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(gpu_worker, "PIN_MEMORY", False)
    monkeypatch.setattr(gpu_worker, "_select_swap_blocks_fn", lambda *_: _copy)


def _copy(sources: Any, destinations: Any, sizes: Any, **_: Any) -> None:
    for source, destination, size in zip(sources, destinations, sizes, strict=True):
        ctypes.memmove(int(destination), int(source), int(size))


class Replica:
    """An engine with ``pp`` stages of ``tp`` workers. ``kv`` has a cache for each worker."""

    def __init__(
        self,
        folder: Path,
        model: str,
        tp: int,
        extra: dict[str, Any],
        *,
        pp: int = 1,
        layout: str = "LBHNC",
    ) -> None:
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            # Use model runner V1: with V2, only a canonical layout is ``is_parallelism_agnostic``.
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
            config = _vllm_config(folder / model, tp, pp)
            config.cache_config.kv_cache_layout = layout
            config.kv_transfer_config = KVTransferConfig(
                kv_connector="OffloadingConnector",
                kv_role="kv_both",
                engine_id=f"test-{uuid.uuid4().hex}",
                kv_connector_extra_config={"cpu_bytes_to_use": 2**22, **extra},
            )
            _without_device(patch)
            names = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
            stages = [
                names[stage * LAYERS // pp : (stage + 1) * LAYERS // pp] for stage in range(pp)
            ]
            specs = [dict.fromkeys(stage, _spec(model, tp)) for stage in stages for _ in range(tp)]
            given: list[Any] = [config, specs, [2**20] * (tp * pp)]
            if get_global_kv_cache_groups:
                given.append(get_global_kv_cache_groups(config, specs))
            caches = get_kv_cache_configs(*given)
            self.kv: list[dict[str, torch.Tensor]] = []
            self._workers = []
            for rank, cache in enumerate(caches):
                config.parallel_config.rank = rank
                spec = OffloadingSpecFactory.create_spec(build_offloading_config(config, cache))
                worker = OffloadingConnectorWorker(spec, config, cache)
                stack.callback(worker.shutdown)
                self.kv.append(_views(cache, KVCacheLayout[layout]))
                worker.register_kv_caches(self.kv[-1])
                self._workers.append(worker)
            config.parallel_config.rank = 0
            self.config = build_offloading_config(config, caches[0])
            self.manager = OffloadingSpecFactory.create_spec(self.config).get_manager()
            stack.callback(self.manager.shutdown)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def fill(self, whole: torch.Tensor) -> None:
        """Write each worker's share of ``whole``, of shape (layers, blocks, heads, tokens, ...)."""
        for cache, share in zip(self.kv, self.shares(whole), strict=True):
            for view, layer in zip(cache.values(), share, strict=True):
                view[: layer.shape[0]] = layer

    def shares(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of ``whole`` that each worker computes: some heads of some layers."""
        tp, (cache, *_) = self.config.parallel.tp_size, self.kv
        heads = next(iter(cache.values())).shape[1]
        return [
            layers[:, :, rank * heads : (rank + 1) * heads] if heads < whole.shape[2] else layers
            for layers in whole.split(len(cache))
            for rank in range(tp)
        ]

    def store(self, keys: list[bytes]) -> None:
        """Store the device's first blocks, and wait until the tiers have them."""
        context = self._request("stores")
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        assert list(output.keys_to_store) == keys
        self._move(keys, output.store_spec, is_load=False)
        self.manager.complete_store(set(keys), context)
        self.manager.on_request_finished(context)
        while self.manager.has_pending_work():
            self._end_step()

    def load(self, keys: list[bytes]) -> list[torch.Tensor] | None:
        """Load chunks into the first blocks; return the blocks, or ``None`` if a key is missing."""
        context = self._request("loads")
        while True:
            answers = {self.manager.lookup(key, context) for key in keys}
            if answers == {_HIT}:
                break
            if answers <= {_HIT, _MISS}:
                return None
            self._end_step()
        self._move(keys, self.manager.prepare_load(keys, context), is_load=True)
        self.manager.complete_load(set(keys), context)
        self.manager.on_request_finished(context)
        blocks = len(keys) * self.config.cache.blocks_per_chunk
        return [torch.stack([view[:blocks] for view in cache.values()]) for cache in self.kv]

    def _request(self, name: str) -> base.ReqContext:
        context = base.ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def _end_step(self) -> None:
        context = base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        self.manager.on_schedule_end(context)

    def _move(self, keys: list[bytes], slots: Any, *, is_load: bool) -> None:
        count = len(keys) * self.config.cache.blocks_per_chunk
        blocks = base.GPULoadStoreSpec(np.arange(count), group_sizes=[count], block_indices=[0])
        number = next(_jobs)
        job = TransferJob("request", *((slots, blocks) if is_load else (blocks, slots)))
        loads, stores = ({number: job}, {}) if is_load else ({}, {number: job})
        for worker in self._workers:
            metadata = OffloadingConnectorMetadata(load_jobs=loads, store_jobs=stores)
            worker.prepare_store_kv(metadata)
            worker.start_kv_transfers(metadata)
            while (meta := worker.build_connector_worker_meta()) is None:
                worker.get_finished(set())
            assert meta.completed_jobs == {number: 1}


@functools.cache
def _vllm_config(folder: Path, tp: int, pp: int) -> VllmConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | _MODELS[folder.name]))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=64,
            enforce_eager=True,
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            distributed_executor_backend="mp" if tp * pp > 1 else None,
        ),
        cache_config=CacheConfig(block_size=BLOCK_TOKENS),
        # vLLM detects its device from installed metadata, which an unpacked release lacks.
        device_config=DeviceConfig(device="cpu"),
    )


def _spec(model: str, tp: int) -> Any:
    width = WIDTH[model]
    if model == "deepseek":
        return MLAAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=1,
            head_size=width,
            dtype=torch.float32,
            max_tp_shards=1,
        )
    return FullAttentionSpec(
        block_size=BLOCK_TOKENS,
        num_kv_heads=HEADS // tp,
        head_size=32,
        head_size_v=width - 32,
        dtype=torch.float32,
    )


def _views(cache: Any, layout: KVCacheLayout) -> dict[str, torch.Tensor]:
    (tensor,), (group,) = cache.kv_cache_tensors, cache.kv_cache_groups
    raw = torch.zeros(tensor.size, dtype=torch.int8)
    views = create_kv_cache_views(raw, group.kv_cache_spec, cache.num_blocks, layout, tensor)
    return dict(zip(tensor.layers, views, strict=True))
