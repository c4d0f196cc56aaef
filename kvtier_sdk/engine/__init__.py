"""The interface for engine adapters: the manager, single tiers and engine memory.

Adapters import the names in ``__all__`` from this module, and values, errors and options from
:mod:`kvtier_sdk`. The worker's classes need the extra ``torch``, and import torch on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier_sdk.config.tiering_config import read_tiers
from kvtier_sdk.engine.adapter_options import AdapterOptions, check_store
from kvtier_sdk.engine.engine_memory import EngineMemory, EngineSlots, OverlappingSlots
from kvtier_sdk.engine.model_tier import ModelTier, Work
from kvtier_sdk.engine.request_hints import read_request
from kvtier_sdk.engine.tools import EngineTools
from kvtier_sdk.event_publisher import EventOptions, EventPublisher
from kvtier_sdk.events import PRIMARY, ChunkNote, announce_blocks
from kvtier_sdk.opening import open_manager, open_pool, open_tier, pool_size_bytes
from kvtier_sdk.operator.services import OperatorServices, check_services
from kvtier_sdk.options.model import StrictModel, validate_options
from kvtier_sdk.options.place import Place, nearest
from kvtier_sdk.options.secrets import url_without_password
from kvtier_sdk.options.units import parse_bytes
from kvtier_sdk.pool.layout import ROW_ALIGNMENT
from kvtier_sdk.pool.pool_file import PoolFile
from kvtier_sdk.runner import PoolMemory
from kvtier_sdk.runner.factory import wants_process
from kvtier_sdk.tiering.hint_executor import OperatorHint
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.outputs import LoadSpec, MissReason, PrepareStoreOutput, ResetScope
from kvtier_sdk.tiering.savings import Savings
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener

if TYPE_CHECKING:
    from kvtier_sdk.worker import CopyResult, DeviceBlocks, KVGroup, KVTensor, OffloadWorker

__all__ = [
    "PRIMARY",
    "ROW_ALIGNMENT",
    "AdapterOptions",
    "ChunkNote",
    "CopyResult",
    "DeviceBlocks",
    "EngineMemory",
    "EngineSlots",
    "EngineTools",
    "EventOptions",
    "EventPublisher",
    "KVGroup",
    "KVTensor",
    "LoadSpec",
    "MissReason",
    "ModelTier",
    "OffloadWorker",
    "OperatorHint",
    "OperatorServices",
    "OverlappingSlots",
    "Place",
    "PoolFile",
    "PoolMemory",
    "PrepareStoreOutput",
    "ResetScope",
    "Savings",
    "StrictModel",
    "TierClient",
    "TierListener",
    "TieringManager",
    "Work",
    "announce_blocks",
    "check_services",
    "check_store",
    "nearest",
    "open_manager",
    "open_pool",
    "open_tier",
    "parse_bytes",
    "pool_size_bytes",
    "read_request",
    "read_tiers",
    "url_without_password",
    "validate_options",
    "wants_process",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kvtier_sdk.worker"), name)
