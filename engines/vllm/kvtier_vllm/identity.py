"""The namespace of an engine's chunks: all facts that decide whether their bytes can be reused."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub.constants import HF_HUB_CACHE

from kvtier_sdk import Namespace
from kvtier_vllm import compat
from kvtier_vllm.model_revision import model_facts
from kvtier_vllm.options import IdentityOptions

if TYPE_CHECKING:
    from vllm.v1.kv_offload.config import OffloadingConfig

#: The layouts of a worker's part of a slot. vLLM's worker reserves room for each tensor of the
#: cache, padding included. Our worker puts a group's tensors one after the other, without padding.
#: With vLLM's canonical layout, both write the same bytes.
THEIR_SLOTS, OUR_SLOTS = "vllm", "kvtier-1"

_log = logging.getLogger("kvtier.vllm")


class Identity:
    """An engine's namespace, which is certain once vLLM has set the seed of the chain hashes.

    vLLM sets the seed shortly before the first request. Tiers are opened earlier, under the
    namespace with the expected seed, so that a wrong setting stops the engine at its start. If the
    actual seed differs, the tiers must be reopened.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        *,
        chunk_bytes: int,
        slot_layout: str,
        declared: IdentityOptions,
    ) -> None:
        self._facts = {
            "engine": f"vllm {declared.kv_release or compat.release()}",
            **_engine_facts(config),
            **model_facts(config.model.name, Path(HF_HUB_CACHE), declared.model_revision),
            "chunk_bytes": chunk_bytes,
            "slot_layout": slot_layout,
        }
        self._settled = False
        self.namespace = self._with_hash(*compat.expected_hash())

    def settle(self) -> bool:
        """Read the actual seed once vLLM has set it; return true if the namespace has changed."""
        if self._settled:
            return False
        actual = compat.actual_hash()
        if actual is None:
            return False
        self._settled = True
        expected, self.namespace = self.namespace, self._with_hash(*actual)
        if actual[0].startswith("xxhash"):
            _log.warning(
                "prefix_caching_hash_algo is %s: unless PYTHONHASHSEED is set to the same value "
                "everywhere, no other process will find what this one stores",
                actual[0],
            )
        return self.namespace != expected

    def _with_hash(self, algorithm: str, seed: bytes) -> Namespace:
        return Namespace({**self._facts, "hash_algorithm": algorithm, "hash_seed": seed.hex()})


def slot_layout(config: OffloadingConfig, *, ours: bool) -> str:
    """Return the slot layout of our worker if ``ours`` is true, otherwise of vLLM's worker."""
    return OUR_SLOTS if ours and not config.canonical_layout else THEIR_SLOTS


def _engine_facts(config: OffloadingConfig) -> dict[str, object]:
    return {
        **compat.device_facts(
            config.model.dtype, [group.tokens_per_block for group in config.groups]
        ),
        "dtype": str(config.model.dtype) if _is_attention(config) else "unknown",
        "kv_layout": config.kv_cache_layout,
        "canonical_layout": config.canonical_layout,
        "parallelism": _parallelism(config),
        "groups": [
            {"tokens_per_block": group.tokens_per_block, "layers": list(group.layer_names)}
            for group in config.groups
        ],
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
    }


def _parallelism(config: OffloadingConfig) -> object:
    """Return the degrees of parallelism, or the reason why they do not affect a chunk's bytes."""
    parallel = config.parallel
    if config.replicated_layout:
        return "independent: replicated_layout"
    # vLLM sets is_parallelism_agnostic even without canonical_layout, although the bytes then
    # depend on the number of workers: each worker's part contains some heads of every layer.
    if config.canonical_layout and parallel.is_parallelism_agnostic:
        return "independent: canonical_layout"
    return {
        "tensor": parallel.tp_size,
        "pipeline": parallel.pp_size,
        "prefill_context": parallel.pcp_size,
        "decode_context": parallel.dcp_size,
        "replicated": False,
    }


def _is_attention(config: OffloadingConfig) -> bool:
    """Return true if every layer caches keys and values, which have the model's dtype.

    A state-space layer or a sparse model's indexer has another dtype, which vLLM does not report.
    """
    names = (name for group in config.groups for name in group.layer_names)
    return all(name.rpartition(".")[2] in ("attn", "mla_attn") for name in names)
