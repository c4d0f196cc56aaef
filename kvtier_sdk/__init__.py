"""kvtier: offloading the KV cache of large language models through tiers of memory and storage.

Backends, policies and codecs import from this package, and engines' adapters import from
:mod:`kvtier_sdk.engine`. The modules that define the exported names are private.
"""

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.aio.clock import Clock, SystemClock, wait_out
from kvtier_sdk.aio.connection import Connection
from kvtier_sdk.aio.connection_pool import ConnectionPool
from kvtier_sdk.aio.running_calls import RunningCalls
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.contract import (
    CONTRACT_VERSION,
    ChunkCodec,
    ChunkTierManager,
    EvictionPolicy,
    ReportRemoved,
    SecondaryTierManager,
    StoreMoment,
    StorePolicy,
    TierContext,
    TierCounter,
    TierGauge,
)
from kvtier_sdk.errors import (
    BackendError,
    BackendLoadError,
    ChunkAuthError,
    ChunkError,
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    DuplicateBackendError,
    KVTierError,
    ReplayError,
    TierAuthError,
    TierCapacityError,
    TierContractError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    UnknownBackendError,
    check_any_answered,
    map_exceptions,
)
from kvtier_sdk.events import OffloadingEvent
from kvtier_sdk.exporter import serve_metrics
from kvtier_sdk.hints import Hint, Outcome, Receipt, Verb
from kvtier_sdk.metrics import (
    METRICS,
    Histogram,
    HistogramValue,
    Metric,
    MetricKind,
    PoolUsage,
    Sample,
    TierStats,
    metric_samples,
)
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.object_names import ObjectNames
from kvtier_sdk.options.tier import BoundedTierConfig, ExpiringTierConfig, RunnerOptions, TierConfig
from kvtier_sdk.options.units import Bytes, BytesOrShare, Count, Flag, Seconds, Share, format_bytes
from kvtier_sdk.options.url import TierURL
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.registry import (
    BackendInfo,
    available_backends,
    load_backend,
    load_codec,
    load_policy,
    load_store_policy,
)
from kvtier_sdk.runner.jobs import Job, JobResult, Operation, Verdict
from kvtier_sdk.tiers.memory import MemoryTier, MemoryTierConfig
from kvtier_sdk.types import (
    Capability,
    Entry,
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    Region,
    RequestContext,
    Transfer,
    Usage,
    make_offload_key,
    split_offload_key,
)

__version__ = "0.1.0"

__all__ = [
    "CONTRACT_VERSION",
    "METRICS",
    "BackendError",
    "BackendInfo",
    "BackendLoadError",
    "BoundedTierConfig",
    "Bytes",
    "BytesOrShare",
    "Capability",
    "ChunkAuthError",
    "ChunkCodec",
    "ChunkError",
    "ChunkNotFoundError",
    "ChunkTierManager",
    "Clock",
    "ConfigError",
    "Connection",
    "ConnectionPool",
    "CorruptChunkError",
    "Count",
    "DuplicateBackendError",
    "Entry",
    "EvictionPolicy",
    "ExpiringTierConfig",
    "Flag",
    "Hint",
    "Histogram",
    "HistogramValue",
    "HostPool",
    "Job",
    "JobResult",
    "KVTierError",
    "Locality",
    "LookupResult",
    "Medium",
    "MemoryTier",
    "MemoryTierConfig",
    "Metric",
    "MetricKind",
    "Namespace",
    "ObjectNames",
    "OffloadKey",
    "OffloadingEvent",
    "Operation",
    "Outcome",
    "PoolLayout",
    "PoolUsage",
    "Receipt",
    "Region",
    "ReplayError",
    "ReportRemoved",
    "RequestContext",
    "RunnerOptions",
    "RunningCalls",
    "Sample",
    "SecondaryTierManager",
    "Seconds",
    "Share",
    "StoreMoment",
    "StorePolicy",
    "StoredNamespace",
    "SystemClock",
    "TierAuthError",
    "TierCapacityError",
    "TierConfig",
    "TierContext",
    "TierContractError",
    "TierCounter",
    "TierError",
    "TierGauge",
    "TierSpec",
    "TierStats",
    "TierTimeoutError",
    "TierURL",
    "TierUnavailableError",
    "TieringConfig",
    "Transfer",
    "UnknownBackendError",
    "Usage",
    "Verb",
    "Verdict",
    "available_backends",
    "check_any_answered",
    "format_bytes",
    "load_backend",
    "load_codec",
    "load_policy",
    "load_store_policy",
    "make_offload_key",
    "map_exceptions",
    "metric_samples",
    "run_blocking",
    "serve_metrics",
    "split_offload_key",
    "wait_out",
]
