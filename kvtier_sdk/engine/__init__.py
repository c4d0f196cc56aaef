"""The interface for engine adapters: the manager, single tiers and engine memory.

Adapters import these names from this module, and values, errors and options from
:mod:`kvtier_sdk`. The worker's classes need the extra ``torch``, and import torch on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvtier_sdk.config.tiering_config import read_tiers as read_tiers
from kvtier_sdk.engine.adapter_options import AdapterOptions as AdapterOptions
from kvtier_sdk.engine.adapter_options import check_store as check_store
from kvtier_sdk.engine.engine_memory import EngineMemory as EngineMemory
from kvtier_sdk.engine.engine_memory import EngineSlots as EngineSlots
from kvtier_sdk.engine.engine_memory import OverlappingSlots as OverlappingSlots
from kvtier_sdk.engine.model_tier import ModelTier as ModelTier
from kvtier_sdk.engine.model_tier import Work as Work
from kvtier_sdk.engine.request_hints import read_request as read_request
from kvtier_sdk.engine.tools import EngineTools as EngineTools
from kvtier_sdk.event_publisher import EventOptions as EventOptions
from kvtier_sdk.event_publisher import EventPublisher as EventPublisher
from kvtier_sdk.events import PRIMARY as PRIMARY
from kvtier_sdk.events import ChunkNote as ChunkNote
from kvtier_sdk.events import announce_blocks as announce_blocks
from kvtier_sdk.opening import open_manager as open_manager
from kvtier_sdk.opening import open_pool as open_pool
from kvtier_sdk.opening import open_tier as open_tier
from kvtier_sdk.opening import pool_size_bytes as pool_size_bytes
from kvtier_sdk.operator.services import OperatorServices as OperatorServices
from kvtier_sdk.operator.services import check_services as check_services
from kvtier_sdk.options.model import StrictModel as StrictModel
from kvtier_sdk.options.model import validate_options as validate_options
from kvtier_sdk.options.place import Place as Place
from kvtier_sdk.options.place import nearest as nearest
from kvtier_sdk.options.secrets import url_without_password as url_without_password
from kvtier_sdk.options.units import parse_bytes as parse_bytes
from kvtier_sdk.pool import PoolMemory as PoolMemory
from kvtier_sdk.pool.layout import ROW_ALIGNMENT as ROW_ALIGNMENT
from kvtier_sdk.pool.pool_file import PoolFile as PoolFile
from kvtier_sdk.runner.factory import wants_process as wants_process
from kvtier_sdk.tiering.hint_executor import OperatorHint as OperatorHint
from kvtier_sdk.tiering.manager import TieringManager as TieringManager
from kvtier_sdk.tiering.outputs import LoadSpec as LoadSpec
from kvtier_sdk.tiering.outputs import MissReason as MissReason
from kvtier_sdk.tiering.outputs import PrepareStoreOutput as PrepareStoreOutput
from kvtier_sdk.tiering.outputs import ResetScope as ResetScope
from kvtier_sdk.tiering.savings import Savings as Savings
from kvtier_sdk.tiering.tier_client import TierClient as TierClient
from kvtier_sdk.tiering.tier_listener import TierListener as TierListener

if TYPE_CHECKING:
    from kvtier_sdk.worker import CopyResult as CopyResult
    from kvtier_sdk.worker import DeviceBlocks as DeviceBlocks
    from kvtier_sdk.worker import KVGroup as KVGroup
    from kvtier_sdk.worker import KVTensor as KVTensor
    from kvtier_sdk.worker import OffloadWorker as OffloadWorker

_NEEDS_TORCH = ("CopyResult", "DeviceBlocks", "KVGroup", "KVTensor", "OffloadWorker")


def __getattr__(name: str) -> Any:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("kvtier_sdk.worker"), name)
