"""Runs SGLang's own cache controller in this process, on one of our tiers."""

from __future__ import annotations

import functools
import hashlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import support.sglang_platform  # noqa: F401

# isort: split
import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

MODEL = "org/model-a"
PAGE_TOKENS = 16
_HEADS, _HEAD_DIM = 4, 64
_RANK_DIM, _ROPE_DIM = 448, 64
_HOST_PAGES = 32
_DEVICE_TOKENS = 64
_PATIENCE_S = 60.0
#: Bytes of a page's keys, with four layers in bfloat16. The page's values have the same size.
PART_BYTES = PAGE_TOKENS * 4 * _HEADS * _HEAD_DIM * 2


class Kind(NamedTuple):
    model: str = MODEL
    layout: str = "page_first"
    is_mla: bool = False  # one latent vector per token replaces keys and values
    dtype: str = "bfloat16"
    tp_rank: int = 0
    tp_size: int = 1
    zero_copy: bool = True  # SGLang passes page indices, not copies of pages
    layers: int = 4


KIND = Kind()


class Host:
    def __init__(self, kind: Kind, **storage: Any) -> None:
        self.kind = kind
        self.pool = make_pool(kind)
        self._requests = itertools.count()
        device_pool = _make_device_pool(kind)
        self.controller = HiCacheController(
            PagedTokenToKVPoolAllocator(
                _DEVICE_TOKENS,
                page_size=PAGE_TOKENS,
                dtype=device_pool.dtype,
                device="cpu",
                kvcache=device_pool,
                need_sort=False,
            ),
            self.pool,
            PAGE_TOKENS,
            _process_group(),
            threading.Event(),
            io_backend="direct",
            enable_storage_metrics=True,
        )
        self.attach(**storage)

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def attach(self, *, backend: str = "dynamic", **tier: Any) -> None:
        kind = self.kind
        place = {"tp_rank": kind.tp_rank, "tp_size": kind.tp_size, "pp_rank": 0, "pp_size": 1}
        with get_parallel().override(attn_dcp_size=1, attn_dcp_rank=0, attn_dp_size=1, **place):
            self.controller.attach_storage_backend(
                backend,
                model_name=kind.model,
                storage_backend_extra_config={
                    "backend_name": "kvtier",
                    "module_path": "kvtier_sglang",
                    "class_name": "KVTierHiCacheStorage",
                    "interface_v1": int(kind.zero_copy),
                    "tier": tier,
                },
            )

    def detach(self) -> None:
        self.controller.detach_storage_backend()

    def store(self, pages: Sequence[int]) -> int:
        indices = self.pool.alloc(len(pages) * PAGE_TOKENS)
        for place, page in enumerate(pages):
            self.pool.set_from_flat_data_page(int(indices[place * PAGE_TOKENS]), self.content(page))
        self.controller.write_storage(indices, _tokens_of(pages), self.hashes(pages))
        operation = self.controller.ack_backup_queue.get(timeout=_PATIENCE_S)
        self.pool.free(indices)
        return int(operation.completed_tokens) // PAGE_TOKENS

    def load(self, pages: Sequence[int]) -> int:
        self.pool.kv_buffer.zero_()
        controller = self.controller
        controller.prefetch(f"request-{next(self._requests)}", _tokens_of(pages))
        operation = controller.prefetch_hit_queue.get(timeout=_PATIENCE_S)
        found = operation.storage_hit_count
        if not found:
            return 0
        operation.host_indices = controller.alloc_prefetch_host_buffers(operation, found)
        controller.prefetch_buffer.put(operation)
        completed = 0
        while not (ack := controller.ack_prefetch_queue.get(timeout=_PATIENCE_S)).completed_req:
            completed = ack.completed_tokens
        loaded = completed // PAGE_TOKENS
        for place, page in enumerate(pages[:loaded]):
            first = int(operation.host_indices[place * PAGE_TOKENS])
            assert torch.equal(self.pool.get_data_page(first), self.content(page))
        self.pool.free(operation.host_indices)
        return loaded

    def hashes(self, pages: Sequence[int]) -> list[str]:
        return list(get_storage_hash_str(_tokens_of(pages), None, page_size=PAGE_TOKENS))

    def content(self, page: int) -> torch.Tensor:
        flat = self.pool.get_dummy_flat_data_page()
        seed = hashlib.sha256(repr((self.kind, page)).encode()).digest()[:6]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        return torch.randn(flat.shape, generator=generator).to(flat.dtype)

    def count(self, counter: str) -> int:
        return sum(getattr(stats, counter) for stats in self.storage.stats_now())

    def failures(self) -> dict[str, int]:
        (stats,) = self.storage.stats_now()
        return dict(stats.failures)


@contextmanager
def hosted(kind: Kind = KIND, **tier: Any) -> Iterator[Host]:
    host = Host(kind, **tier)
    try:
        yield host
    finally:
        host.detach()


def stored_elsewhere(pages: Sequence[int], kind: Kind, tier: dict[str, Any]) -> int:
    with hosted(kind, **tier) as host:
        return host.store(pages)


def _tokens_of(pages: Sequence[int]) -> list[int]:
    return [page * PAGE_TOKENS + token for page in pages for token in range(PAGE_TOKENS)]


@functools.cache
def _process_group() -> Any:
    """Return a process group with only this rank, because SGLang's controller needs a group."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return torch.distributed.group.WORLD


def _make_device_pool(kind: Kind) -> Any:
    """Create the device's pool in CPU memory; nothing is copied to or from the pool."""
    common = {
        "size": _DEVICE_TOKENS,
        "page_size": PAGE_TOKENS,
        "dtype": getattr(torch, kind.dtype),
        "layer_num": kind.layers,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind.is_mla:
        return MLATokenToKVPool(kv_lora_rank=_RANK_DIM, qk_rope_head_dim=_ROPE_DIM, **common)
    return MHATokenToKVPool(head_num=_HEADS, head_dim=_HEAD_DIM, **common)


def make_pool(kind: Kind) -> Any:
    dtype = getattr(torch, kind.dtype)
    cpu = torch.device("cpu")
    common = {
        "host_to_device_ratio": 2.0,
        "host_size": 0,
        "page_size": PAGE_TOKENS,
        "layout": kind.layout,
        "pin_memory": False,
        "device_capacity_tokens": PAGE_TOKENS,
        "start_layer": 0,
        "end_layer": kind.layers,
        "host_token_capacity": _HOST_PAGES * PAGE_TOKENS,
    }
    if kind.is_mla:
        rows = tuple(
            torch.zeros(PAGE_TOKENS, 1, _RANK_DIM + _ROPE_DIM, dtype=dtype)
            for _ in range(kind.layers)
        )
        mla = MLABufferInfo(
            buffers=rows,
            data_ptrs=_addresses(rows),
            layer_indices=tuple(range(kind.layers)),
            device_layer_num=kind.layers,
            page_size=PAGE_TOKENS,
            kv_lora_rank=_RANK_DIM,
            qk_rope_head_dim=_ROPE_DIM,
            kv_cache_dim=_RANK_DIM + _ROPE_DIM,
            dtype=dtype,
            device=cpu,
        )
        return MLATokenToKVPoolHost(mla, target_layer_num=kind.layers, **common)
    keys, values = (
        tuple(torch.zeros(PAGE_TOKENS, _HEADS, _HEAD_DIM, dtype=dtype) for _ in range(kind.layers))
        for _ in range(2)
    )
    mha = MHABufferInfo(
        buffers=KVBuffers(
            k=keys,
            v=values,
            k_data_ptrs=_addresses(keys),
            v_data_ptrs=_addresses(values),
            layout=KVBufferLayout.NHD,
        ),
        page_size=PAGE_TOKENS,
        head_num=_HEADS,
        head_dim=_HEAD_DIM,
        v_head_dim=_HEAD_DIM,
        dtype=dtype,
        device=cpu,
    )
    return MHATokenToKVPoolHost(mha, **common)


def _addresses(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.uint64)
