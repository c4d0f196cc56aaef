"""Imports Mooncake's client library on demand, and connects clients to the store's master."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvtier_mooncake.config import MooncakeTierConfig
from kvtier_sdk import ConfigError, Region, TierError, TierUnavailableError

# Size of the client's own buffer, used only for objects that the store has moved to disk.
_BUFFER_BYTES = 16 * 2**20
#: The directory in which Linux lists RDMA devices.
_DEVICES = Path("/sys/class/infiniband")


def make_client(config: MooncakeTierConfig) -> tuple[Any, Any]:
    """Import the library; return a client that is not connected, and its replication settings."""
    timeout_ms = str(round(config.timeout_s * 1000))
    os.environ["MC_RPC_TIMEOUT_MS"] = os.environ["MC_RPC_CONNECT_TIMEOUT_MS"] = timeout_ms
    # One attempt is enough, because kvtier's core retries with pauses.
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig
    except ModuleNotFoundError:
        raise ConfigError(
            "the Mooncake client is not installed: pip install mooncake-transfer-engine, or on a "
            "machine without CUDA mooncake-transfer-engine-non-cuda"
        ) from None
    except ImportError as error:
        raise ConfigError(
            f"the Mooncake client cannot be loaded: {error}; as root, "
            "apt-get install libibverbs1 libnuma1 libcurl4"
        ) from None
    replication = ReplicateConfig()
    replication.replica_num = config.replicas
    return MooncakeDistributedStore(), replication


def reach_master(config: MooncakeTierConfig) -> str:
    """Connect to the master once, without the client's retries; return this machine's address."""
    try:
        with socket.create_connection((config.host, config.port), config.timeout_s) as connection:
            address: str = connection.getsockname()[0]
    except OSError as error:
        raise TierUnavailableError(f"the master {config.master}: {error}") from None
    return address


def connect(client: Any, config: MooncakeTierConfig, regions: Iterable[Region]) -> None:
    """Connect a client to its master. For RDMA, register the regions with the client."""
    if config.protocol == "rdma":
        # Check here, because the client reports a missing device with the status of an outage.
        here = {device.name for device in _DEVICES.glob("*")}
        wanted = set((config.devices or "").split(",")) - {""}
        if not here or wanted - here:
            raise ConfigError(
                f"option 'devices': {config.devices or 'any RDMA device'} is not on this machine, "
                f"which has {', '.join(sorted(here)) or 'none'} ('ls {_DEVICES}')"
            )
    own_address = reach_master(config)
    status = client.setup(
        config.address or own_address,
        config.metadata_server,
        config.lend_bytes,
        _BUFFER_BYTES,
        config.protocol,
        config.devices or "",
        config.master,
    )
    if status:
        raise TierUnavailableError(
            f"the client cannot be set up (status {status}); its log has why"
        )
    # Do not register the memory for TCP. TCP works without a registration, and any peer could
    # read and write registered memory.
    for region in regions if config.protocol == "rdma" else ():
        if client.register_buffer(*region):
            raise TierError("the client cannot register the host pool; see 'ulimit -l'")
