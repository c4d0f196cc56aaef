"""Options of the Mooncake tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from kvtier_sdk import Bytes, ConfigError, Count, Seconds, TierConfig, TierURL

_NODES_KEEP_THE_LIMIT = (
    "the nodes' memory is the limit; once it is nearly full, the master evicts what was used least"
)
_LEAST_LENT_BYTES = 16 * 2**20


class MooncakeTierConfig(TierConfig):
    """Options of the Mooncake tier.

    Attributes:
        host: the master's host.
        port: the master's RPC port.
        metadata_server: the URL of a metadata server that knows the other machines' addresses, or
            ``P2PHANDSHAKE`` to ask the machines themselves.
        protocol: the transport protocol for chunks.
        devices: network devices for ``rdma``, separated by commas; by default, the client chooses.
        address: the name or address that the nodes use for this machine; by default, the local
            address of a connection to the master.
        replicas: the number of nodes that keep a copy of each chunk.
        lend_bytes: the size of the memory that this machine lends to the store while the tier is
            open.
        timeout_s: the time limit for a reply from the master.
    """

    host: str = "127.0.0.1"
    port: Count = Field(50051, ge=1, le=65535)
    metadata_server: str = "P2PHANDSHAKE"
    protocol: Literal["tcp", "rdma"] = "tcp"
    devices: str | None = None
    address: str | None = None
    replicas: Count = Field(1, ge=1, le=64)
    lend_bytes: Bytes = Field(0, alias="lend")
    timeout_s: Seconds = Field(2.0, alias="timeout", ge=0.1)

    refuses: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("capacity", "min_free", "ttl", "max_age"), _NODES_KEEP_THE_LIMIT
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.devices is not None and self.protocol != "rdma":
            raise ValueError("option 'devices' is given without 'protocol=rdma'")
        if 0 < self.lend_bytes < _LEAST_LENT_BYTES:
            raise ValueError("option 'lend' is below 16MiB, the store's minimum")
        return self

    @property
    def master(self) -> str:
        """The master's host and port in the form that the client expects."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Read the options in a URL such as ``mooncake://master:50051?protocol=rdma``."""
        if url.path.strip("/") or url.username or url.password:
            raise ConfigError(
                f"{url.scheme}: takes the master alone; write 'mooncake://kv-1:50051'"
            )
        return url.options_beside({"host": url.host, "port": url.port})

    def location(self) -> str:
        """Return the master's URL, without options."""
        return f"mooncake://{self.master}"
