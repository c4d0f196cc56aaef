"""Copies KV blocks between a device's tensors and a pool's slots. Needs the extra ``torch``."""

from kvtier_sdk.errors import ConfigError

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ConfigError("kvtier_sdk.worker needs torch: pip install 'kvtier-sdk[torch]'") from error

from kvtier_sdk.worker.geometry import DeviceBlocks as DeviceBlocks
from kvtier_sdk.worker.geometry import KVGroup as KVGroup
from kvtier_sdk.worker.geometry import KVTensor as KVTensor
from kvtier_sdk.worker.worker import CopyResult as CopyResult
from kvtier_sdk.worker.worker import OffloadWorker as OffloadWorker
