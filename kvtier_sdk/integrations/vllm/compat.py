"""What differs between vLLM's releases, and what of it is not in its abstract classes."""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
from collections.abc import Iterable

import vllm
from vllm import envs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

#: Releases that this package was tried with.
TRIED = ("0.32", "0.33")

#: Whether vLLM says when the copies of before a reset have ended (since 0.33).
ANNOUNCES_END_OF_RESET = hasattr(OffloadingManager, "on_reset_flushed")

_HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

_log = logging.getLogger("kvtier.vllm")


def release() -> str:
    """Major and minor number of this vLLM, for example ``"0.32"``."""
    return ".".join(str(vllm.__version__).split(".")[:2])


@functools.cache
def warn_if_untried() -> None:
    """Say once, if so, that this release of vLLM is not one that was tried."""
    if release() not in TRIED:
        _log.warning(
            "this is vLLM %s; kvtier was tried with %s, and what it relies on may have changed",
            vllm.__version__,
            " and ".join(TRIED),
        )


def register_tier(tier_type: str, module: str, class_name: str) -> None:
    """Register a secondary tier with vLLM, unless it is registered.

    Args:
        tier_type: what stands in the configuration.
        module: where the class is imported from, when it is asked for.
        class_name: the class.
    """
    # The factory offers no other way of asking than to be asked for the class; to register a
    # name twice is an error.
    if tier_type not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(tier_type, module, class_name)


def device_facts(dtype: str, block_sizes: Iterable[int]) -> dict[str, object]:
    """What about this host decides how keys and values lie within a block.

    The name of vLLM's KV layout says nothing of the inside that a kernel gives a block: on a CPU
    it is packed for the instruction set that is found, at the same size.

    Args:
        dtype: of the KV cache, as vLLM names it.
        block_sizes: tokens of a block, of each group.

    Returns:
        Facts of a namespace: ``device`` and ``kv_packing``.
    """
    packing: object = None
    if current_platform.is_cpu():
        packing = [platform.machine(), *_cpu_packing(dtype, block_sizes)]
    elif current_platform.is_rocm():
        packing = {"shuffled": bool(getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False))}
    # The type of a ROCm device is "cuda" too.
    device = getattr(current_platform, "device_name", current_platform.device_type)
    return {"device": str(device), "kv_packing": packing}


def _cpu_packing(dtype: str, block_sizes: Iterable[int]) -> list[str]:
    """vLLM's own choice, or all that it could have made it by."""
    # A quantised cache is packed by the type of the model, which is not known here: the one that
    # is packed in more than one way.
    kind = STR_DTYPE_TO_TORCH_DTYPE[dtype if dtype in ("float16", "float32") else "bfloat16"]
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # The size of a head, which the model decides, is left out.
        return sorted({_get_attn_isa(kind, tokens) for tokens in block_sizes})
    except (ImportError, TypeError):
        return _instruction_sets()


def _instruction_sets() -> list[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            # On x86 and on ARM.
            if name.strip() in ("flags", "Features"):
                return sorted(value.split())
    return []


def expected_hash() -> tuple[str, bytes]:
    """Algorithm and seed of the chain hashes, as they will be if nothing else is configured.

    Before the first request vLLM does not say which they are.
    """
    name = "sha256"
    hash_function = get_hash_fn_by_name(name)
    return name, bytes(hash_function(kv_cache_utils.resolve_none_hash_seed(hash_function)))


def actual_hash() -> tuple[str, bytes] | None:
    """Algorithm and seed of this process's chain hashes; ``None`` while vLLM has not set them."""
    seed: bytes | None = getattr(kv_cache_utils, "NONE_HASH", None)
    if seed is None:
        return None
    source = kv_cache_utils.get_none_hash_seed()
    for name in _HASH_ALGORITHMS:
        # One of them needs a package that may be missing.
        with contextlib.suppress(ImportError, ModuleNotFoundError, ValueError):
            if get_hash_fn_by_name(name)(source) == seed:
                return name, bytes(seed)
    return "unknown", bytes(seed)
