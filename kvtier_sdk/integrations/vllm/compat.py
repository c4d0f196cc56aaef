"""What differs between vLLM's releases, and what of it is not in its abstract classes."""

from __future__ import annotations

import contextlib
import functools
import logging

import vllm
from vllm.utils.hashing import get_hash_fn_by_name
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
