"""Differences between releases of vLLM, and uses of vLLM beyond its abstract classes."""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import OffloadingManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvtier_sdk import OffloadKey

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

#: The vLLM releases that this package was tested with.
TRIED = ("0.32", "0.33")

#: True if vLLM reports the end of all copies that began before a reset (since 0.33).
ANNOUNCES_END_OF_RESET = hasattr(OffloadingManager, "on_reset_flushed")

_HASH_ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")

_WRAPPED = "wrapped_by_kvtier"

#: kvtier's totals in vLLM's log line about transfers.
_LOGGED = tuple(
    f"kvtier_{name}_total"
    for name in (
        *("hit_chunks", "misses", "saved_tokens"),
        *("stored_object_bytes", "loaded_object_bytes", "failed_chunks"),
    )
)

_UNTOLD_STOPS = (
    "this vLLM does not tell why answers end (%s), so the pool's policy expects the next turn "
    "equally soon after each of them"
)

_log = logging.getLogger("kvtier.vllm")

# Each engine's listener for blocks, by the ``id()`` of the engine's events configuration.
_described: dict[int, Callable[[OffloadKey, Callable[[], Any]], None]] = {}


def release() -> str:
    """Return the major and minor number of this vLLM, for example ``"0.32"``."""
    return ".".join(str(vllm.__version__).split(".")[:2])


@functools.cache
def warn_if_untried() -> None:
    if release() not in TRIED:
        _log.warning(
            "this is vLLM %s; kvtier was tested with %s, and this release may differ from them",
            vllm.__version__,
            " and ".join(TRIED),
        )


def register_tier(tier_type: str, module: str, class_name: str) -> None:
    """Register a secondary tier with vLLM, unless it is registered already."""
    # Registering a name twice is an error, and the factory has no public way to look a name up.
    if tier_type not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(tier_type, module, class_name)


def end_tokens(req_context: ReqContext) -> dict[OffloadKey, int]:
    """Return a request's chunks in prefix order, each with the number of tokens up to its end."""
    # Read a private attribute, because vLLM's public method returns only one chunk's position.
    found: dict[OffloadKey, int] = getattr(req_context, "_offload_key_positions", {})
    return found


def _wrap(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace vLLM's function by ``call(function, *arguments)``, unless it is replaced already."""
    function = getattr(owner, name)
    if vars(function).get(_WRAPPED):
        return

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(function, *args, **kwargs)

    vars(wrapper)[_WRAPPED] = True
    setattr(owner, name, wrapper)


def tell_blocks(
    events_config: Any, describe: Callable[[OffloadKey, Callable[[], Any]], None]
) -> Callable[[], object]:
    """Call ``describe`` for each stored or found chunk until the returned function is called.

    ``describe`` gets the chunk's key, and a function that makes the metadata of the chunk's blocks.
    """
    # Wrap these methods, because only they have both a chunk and the request with its tokens.
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
            OffloadingEventsTracker as Tracker,
        )

        tell_and_record = functools.partial(_tell_and_record, Tracker._build_event_metadata)
        for name in ("record_store", "record_lookup"):
            _wrap(Tracker, name, tell_and_record)
    except (ImportError, AttributeError) as error:
        _log.warning("routers are not told of this vLLM's tokens: %s", error)
        return lambda: None
    _described[id(events_config)] = describe
    return lambda: _described.pop(id(events_config), None)


def _tell_and_record(
    build: Callable[..., Any],
    record: Callable[..., None],
    tracker: Any,
    request: Any,
    group: Any,
    index: int,
    key: OffloadKey,
) -> None:
    tell = _described.get(id(tracker.config))
    if tell is not None and group.sliding_window_size_in_chunks is None:
        try:
            tell(key, lambda: build(tracker, request, group, index))
        except (AttributeError, AssertionError, KeyError, TypeError) as error:
            _warn_once("routers are not told of some chunks: %s", repr(error))
    record(tracker, request, group, index, key)


def tell_stops() -> None:
    """Make connectors call ``note_stop`` when an answer ends, if their manager has this method."""
    # These names are internal to vLLM, so any release may remove them.
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
            OffloadingConnectorScheduler as Scheduler,
        )

        _wrap(Scheduler, "request_finished", _tell_and_finish)
    except (ImportError, AttributeError) as error:
        _warn_once(_UNTOLD_STOPS, str(error))


def _tell_and_finish(
    finish: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    note = getattr(getattr(scheduler, "manager", None), "note_stop", None)
    if note is not None:
        try:
            stop = _stop_of(request)
            if stop is not None:
                note(request.request_id, stop)
        except AttributeError as error:
            _warn_once(_UNTOLD_STOPS, str(error))
    return finish(scheduler, request, *args, **kwargs)


class _TraceHeaders(dict[str, str]):
    """A request's trace headers, stored in vLLM's context of the request."""


def tell_traces() -> None:
    """Store each request's trace headers in the connector's context of the request."""
    # Wrap this function, because only it has both the context and the headers.
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

        _wrap(scheduler, "_create_req_context", _make_and_tell)
    except (ImportError, AttributeError) as error:
        _warn_once("spans do not join the traces of this vLLM's requests: %s", str(error))


def _make_and_tell(make: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
    made = make(request, *args, **kwargs)
    headers = getattr(request, "trace_headers", None)
    if headers:
        made.set_state(_TraceHeaders(headers))
    return made


def trace_headers(req_context: ReqContext) -> Mapping[str, str]:
    """Return the W3C trace headers of a request's client, if vLLM exports traces."""
    headers: Mapping[str, str] | None = req_context.get_state(_TraceHeaders)
    return headers or {}


def shorten_log() -> None:
    """Show only six of kvtier's hundreds of series in vLLM's log line about transfers."""
    _wrap(OffloadingConnectorStats, "reduce", _reduce_and_shorten)


def _reduce_and_shorten(reduce: Callable[..., Any], stats: Any) -> dict[str, int | float]:
    line: dict[str, int | float] = {}
    for series, value in reduce(stats).items():
        name, _, _ = series.partition(":")
        if not series.startswith("kvtier_"):
            line[series] = value
        elif name in _LOGGED and value:
            line[name] = line.get(name, 0) + value
    return line


def _stop_of(request: Any) -> str | None:
    """Return why a request's answer ended, for example ``"length"``, or ``None`` before its end."""
    reason = request.get_finished_reason()
    if reason is None:
        return None
    # Add the stop token, because tool-calling models end a call with a special token.
    token = request.stop_reason
    label = str(reason).lower()
    return f"{label} {token}" if isinstance(token, int) else label


@functools.cache
def _warn_once(message: str, why: str) -> None:
    _log.warning(message, why)


def check_engine_configs(check: Callable[[Any], None]) -> None:
    """Call ``check`` with each engine's configuration, before vLLM starts a worker."""
    # vLLM itself reads the connector's options only in the workers, after loading the model.
    module = sys.modules.get("vllm.engine.arg_utils")
    if module is None:
        return  # a process without this module does not configure an engine

    def make_and_check(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        check(made)
        return made

    try:
        _wrap(module.EngineArgs, "create_engine_config", make_and_check)
    except AttributeError:
        _log.warning(
            "cannot hook into this vLLM's configuration: kvtier's options are checked only after "
            "the model has loaded"
        )


def runs_here(vllm_config: Any) -> bool:
    # Look for local engines, because a front end's engines may all run on other machines.
    parallel = vllm_config.parallel_config
    return bool(parallel.data_parallel_backend != "ray" and parallel.data_parallel_size_local > 0)


def is_command() -> bool:
    """Return true if this program is vLLM's command line, false if it uses vLLM as a library."""
    return "vllm.entrypoints.cli.main" in sys.modules


def computation() -> Any:
    """Return the device stream on which the calling thread computes; ``None`` on a CPU."""
    # vLLM's own worker finds the stream in the same way.
    return None if current_platform.is_cpu() else current_platform.current_stream()


def device_facts(dtype: str, block_sizes: Iterable[int]) -> dict[str, object]:
    """Return the facts about this host that determine the order of values within a block."""
    # vLLM's KV layout omits the packing, which on a CPU depends on the instruction set.
    packing: object = None
    if current_platform.is_cpu():
        packing = [platform.machine(), *_cpu_packing(dtype, block_sizes)]
    elif current_platform.is_rocm():
        packing = {"shuffled": bool(getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False))}
    # Prefer the name, because the device type of ROCm is "cuda" too.
    device = getattr(current_platform, "device_name", current_platform.device_type)
    return {"device": str(device), "kv_packing": packing}


def _cpu_packing(dtype: str, block_sizes: Iterable[int]) -> list[str]:
    """Return vLLM's choice of packing, or the instruction sets if the choice cannot be read."""
    # The packing of a quantised cache depends on the model's dtype, which is unknown here. Assume
    # bfloat16, because no other dtype has more than one packing.
    kind = STR_DTYPE_TO_TORCH_DTYPE[dtype if dtype in ("float16", "float32") else "bfloat16"]
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        # Leave out the head size, because the namespace already includes the model.
        return sorted({_get_attn_isa(kind, tokens) for tokens in block_sizes})
    except (ImportError, TypeError):
        return _instruction_sets()


def _instruction_sets() -> list[str]:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            # The line with the instruction sets is "flags" on x86, and "Features" on ARM.
            if name.strip() in ("flags", "Features"):
                return sorted(value.split())
    return []


def expected_hash() -> tuple[str, bytes]:
    """Return the chain-hash algorithm and seed under vLLM's default configuration."""
    name = "sha256"
    hash_function = get_hash_fn_by_name(name)
    return name, bytes(hash_function(kv_cache_utils.resolve_none_hash_seed(hash_function)))


def actual_hash() -> tuple[str, bytes] | None:
    """Return this process's chain-hash algorithm and seed; ``None`` until vLLM sets them."""
    seed: bytes | None = getattr(kv_cache_utils, "NONE_HASH", None)
    if seed is None:
        return None
    source = kv_cache_utils.get_none_hash_seed()
    for name in _HASH_ALGORITHMS:
        # Skip algorithms whose package is missing.
        with contextlib.suppress(ImportError, ValueError):
            if get_hash_fn_by_name(name)(source) == seed:
                return name, bytes(seed)
    return "unknown", bytes(seed)
