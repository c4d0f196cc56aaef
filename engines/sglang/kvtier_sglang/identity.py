"""The namespace and the chunk keys of SGLang's pages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from kvtier_sdk import Namespace, OffloadKey, make_offload_key, split_offload_key

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

#: Attributes of a host pool that describe its pages' content. A pool may lack some of them.
_CONTENT = (
    "layout",
    "page_size",
    "start_layer",
    "end_layer",
    "layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "index_head_dim",
    "storage_format_tag",
)
#: Pools whose pages differ between ranks even with MLA, because the ranks split recurrent state.
_ALWAYS_SPLIT = frozenset({"mamba"})


class PageIdentity:
    def __init__(
        self,
        config: HiCacheStorageConfig,
        pool: Any,
        pool_name: str,
        declared: Mapping[str, Any],
    ) -> None:
        content = {name: getattr(pool, name, None) for name in _CONTENT}
        ranks = {
            "pp": (config.pp_rank, config.pp_size),
            "cp": (config.attn_cp_rank, config.attn_cp_size),
            "dcp": (config.dcp_rank, config.dcp_size),
        }
        # With MLA all ranks of a tensor-parallel group hold the same bytes, so they share keys.
        if not config.is_mla_model or pool_name in _ALWAYS_SPLIT:
            ranks["tp"] = (config.tp_rank, config.tp_size)
        # A recurrent state or a sparse model's index does not have the dtype that the pool reports.
        # The actual dtype is unknown.
        has_others = pool_name in _ALWAYS_SPLIT or content.get("index_head_dim") is not None
        release = ".".join(version("sglang").split(".")[:2])
        self.namespace = Namespace(
            {
                **declared,
                "engine": f"sglang {release}",
                "model": config.model_name or "",
                "pool": pool_name,
                "dtype": "unknown" if has_others else str(pool.dtype).removeprefix("torch."),
                "content": {name: value for name, value in content.items() if value is not None},
                "parallelism": {name: size for name, (_, size) in ranks.items()},
            }
        )
        place = ",".join(f"{name}{rank}" for name, (rank, _) in sorted(ranks.items()))
        self._suffix = f":{place}".encode()

    def key(self, page_hash: str, part: int) -> OffloadKey:
        return make_offload_key(page_hash.encode() + self._suffix, part)

    def block_of(self, parts: int, key: OffloadKey) -> tuple[int, int, int] | None:
        """Return a page's hash, group and number of chunks; ``None`` for another rank's page."""
        joined, _ = split_offload_key(key)
        if not joined.endswith(self._suffix):
            return None
        try:
            first = bytes.fromhex(joined[:16].decode())
        except ValueError:
            return None
        return int.from_bytes(first, "big", signed=True), 0, parts
