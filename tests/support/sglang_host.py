"""SGLang's own host pools with one of our tiers as their storage, in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import support.sglang_platform  # noqa: F401  before SGLang
import torch
from sglang.srt.mem_cache.device_pool_info import (
    KVBufferLayout,
    KVBuffers,
    MHABufferInfo,
    MLABufferInfo,
)
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory

MODEL = "org/model-a"
PAGE_TOKENS = 16
_LAYERS, _HEADS, _HEAD_DIM = 4, 4, 64
_RANK_DIM, _ROPE_DIM = 448, 64
_HOST_PAGES = 32
#: Keys and values of a page, in bfloat16; with MLA a quarter of each.
PAGE_BYTES = 2 * PAGE_TOKENS * _LAYERS * _HEADS * _HEAD_DIM * 2


class Kind(NamedTuple):
    """A model, and how SGLang keeps its pages.

    Attributes:
        model: SGLang's name of it.
        layout: of the host pool.
        is_mla: true for one latent vector a token in place of keys and values.
        dtype: of the pool.
        tp_rank: this rank.
        tp_size: ranks of the tensor-parallel group.
        zero_copy: true if SGLang names pages by their places.
    """

    model: str = MODEL
    layout: str = "page_first"
    is_mla: bool = False
    dtype: str = "bfloat16"
    tp_rank: int = 0
    tp_size: int = 1
    zero_copy: bool = True


KIND = Kind()


class Host:
    """A host pool, and the storage that SGLang's factory has made for it.

    Attributes:
        pool: SGLang's host pool.
        storage: our storage backend.
    """

    def __init__(self, kind: Kind, **tier: Any) -> None:
        self.kind = kind
        self.pool = _make_pool(kind)
        config = HiCacheStorageConfig(
            tp_rank=kind.tp_rank,
            tp_size=kind.tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=kind.is_mla,
            enable_storage_metrics=True,
            is_page_first_layout=kind.layout == "page_first",
            model_name=kind.model,
            extra_config={
                "backend_name": "kvtier",
                "module_path": "kvtier_sdk.integrations.sglang",
                "class_name": "KVTierHiCacheStorage",
                "interface_v1": int(kind.zero_copy),
                "tier": tier,
            },
        )
        self.storage = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.storage.register_mem_pool_host(self.pool)
        self.storage.on_host_pools_registered()

    def store(self, pages: Sequence[int]) -> list[bool]:
        """Fill pages of the host pool, and store them as SGLang's backup thread does."""
        for place, page in enumerate(pages):
            self.pool.set_from_flat_data_page(place * PAGE_TOKENS, self.content(page))
        hashes = hashes_of(pages)
        if self.kind.zero_copy:
            return list(self.storage.batch_set_v1(hashes, _indices(len(pages))))
        values = [self.pool.get_data_page(place * PAGE_TOKENS) for place in range(len(pages))]
        return [bool(self.storage.batch_set(hashes, values))] * len(pages)

    def load(self, pages: Sequence[int]) -> int:
        """Look pages up and load those found as SGLang's prefetch thread does.

        Returns:
            How many of the first pages are in the host pool now, with the bytes that were stored.
        """
        hashes = hashes_of(pages)
        found = self.storage.batch_exists(hashes)
        self.pool.kv_buffer.zero_()
        if self.kind.zero_copy:
            are_there = self.storage.batch_get_v1(hashes[:found], _indices(found))
        else:
            targets = [self.pool.get_dummy_flat_data_page() for _ in range(found)]
            loaded = self.storage.batch_get(hashes[:found], targets)
            are_there = [page is not None for page in loaded]
            for place, page in enumerate(loaded):
                if page is not None:
                    self.pool.set_from_flat_data_page(place * PAGE_TOKENS, page)
        whole = are_there.index(False) if False in are_there else len(are_there)
        for place, page in enumerate(pages[:whole]):
            assert torch.equal(self.pool.get_data_page(place * PAGE_TOKENS), self.content(page))
        return whole

    def content(self, page: int) -> torch.Tensor:
        """Return the content of a page, which is of its kind and its hash."""
        flat = self.pool.get_dummy_flat_data_page()
        seed = hashlib.sha256(repr((self.kind, page)).encode()).digest()[:6]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big"))
        return torch.randn(flat.shape, generator=generator).to(flat.dtype)

    def count(self, counter: str) -> int:
        """Return a counter of the tier."""
        return sum(getattr(stats, counter) for stats in self.storage.stats_now())

    def failures(self) -> dict[str, int]:
        """Return the tier's failures by reason."""
        (stats,) = self.storage.stats_now()
        return dict(stats.failures)


@contextmanager
def hosted(kind: Kind = KIND, **tier: Any) -> Iterator[Host]:
    """Make a host, and close its storage at the end as SGLang's detach does.

    Args:
        kind: of its model and pages.
        tier: the tier's entry.
    """
    host = Host(kind, **tier)
    try:
        yield host
    finally:
        host.storage.close()


def stored_elsewhere(pages: Sequence[int], kind: Kind, tier: dict[str, Any]) -> int:
    """Store pages in this process, for another one to call; return how many were stored."""
    with hosted(kind, **tier) as host:
        return sum(host.store(pages))


def hashes_of(pages: Iterable[int]) -> list[str]:
    """Return the hashes of pages, which are the same for each kind of model."""
    return [hashlib.sha256(b"page %d" % page).hexdigest() for page in pages]


def _indices(pages: int) -> torch.Tensor:
    return torch.arange(pages * PAGE_TOKENS)


def _make_pool(kind: Kind) -> Any:
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
        "end_layer": _LAYERS,
        "host_token_capacity": _HOST_PAGES * PAGE_TOKENS,
    }
    # The device's pool has no tokens: nothing is copied to or from it here.
    if kind.is_mla:
        rows = tuple(
            torch.zeros(PAGE_TOKENS, 1, _RANK_DIM + _ROPE_DIM, dtype=dtype) for _ in range(_LAYERS)
        )
        mla = MLABufferInfo(
            buffers=rows,
            data_ptrs=_addresses(rows),
            layer_indices=tuple(range(_LAYERS)),
            device_layer_num=_LAYERS,
            page_size=PAGE_TOKENS,
            kv_lora_rank=_RANK_DIM,
            qk_rope_head_dim=_ROPE_DIM,
            kv_cache_dim=_RANK_DIM + _ROPE_DIM,
            dtype=dtype,
            device=cpu,
        )
        return MLATokenToKVPoolHost(mla, target_layer_num=_LAYERS, **common)
    keys, values = (
        tuple(torch.zeros(PAGE_TOKENS, _HEADS, _HEAD_DIM, dtype=dtype) for _ in range(_LAYERS))
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
