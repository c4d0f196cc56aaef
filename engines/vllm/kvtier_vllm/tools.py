"""vLLM's part of the ``kvtier`` command, including ``kvtier vllm-config``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, ClassVar

import typer

from kvtier_sdk import ConfigError, OffloadKey, TieringConfig
from kvtier_sdk.engine import EngineTools, url_without_password
from kvtier_vllm.block_hashes import chunk_keys
from kvtier_vllm.transfer_config import (
    POOL_DIRECTORY,
    is_transfer_config,
    make_transfer_config,
    read_transfer_config,
)


class Manager(Enum):
    """The manager that decides which chunks are kept."""

    KVTIER = "kvtier"
    VLLM = "vllm"


def vllm_config_command(
    tiers: Annotated[
        list[str],
        typer.Argument(
            metavar="URL...",
            help="The tiers, in the order in which they are searched, for example "
            "'file:///data/kv?capacity=200GiB'.",
        ),
    ],
    pool: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Host memory of all workers of a replica together, for example 32GiB. /dev/shm "
            "needs as much room.",
        ),
    ],
    manager: Annotated[
        Manager, typer.Option(help="Whose manager runs: kvtier's, or vLLM's own with our tiers.")
    ] = Manager.KVTIER,
    model_revision: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What tells this model from others of its name. vLLM's log asks for it if needed.",
        ),
    ] = None,
    admin_socket: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Where kvtier's manager answers 'kvtier top', 'set', 'drain'. 'auto' is a "
            "directory that only the engine's user can enter; 'off' is nowhere.",
        ),
    ] = "auto",
    metrics_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            help="Where kvtier's manager serves metrics, to this machine only; 0 is nowhere. Each "
            "engine of a machine needs its own.",
        ),
    ] = 9400,
) -> None:
    """Print the value of vLLM's --kv-transfer-config for these tiers, as JSON.

    Every option is checked first. No store is contacted: use 'kvtier check' for that.

    \b
      kvtier vllm-config 'file:///data/kv?capacity=200GiB' --pool 32GiB > kv.json
      vllm serve MODEL --kv-transfer-config "$(cat kv.json)"
    """
    for url in tiers:
        if url_without_password(url) != url:
            raise ConfigError(
                f"{url_without_password(url)} has a secret in it, which vLLM's command line would "
                "show to everyone on the machine"
            )
    services: dict[str, Any] = {} if admin_socket == "off" else {"admin_socket": admin_socket}
    services |= {"metrics_port": metrics_port} if metrics_port else {}
    config = make_transfer_config(
        tiers,
        pool,
        our_manager=manager is Manager.KVTIER,
        model_revision=model_revision,
        services=services,
    )
    read_transfer_config(config, where="vllm-config")
    print(json.dumps(config, indent=2))


class VLLMTools(EngineTools):
    """The ``kvtier`` command's hooks for reading vLLM's options and computing chunk keys."""

    commands: ClassVar[Mapping[str, Callable[..., None]]] = {"vllm-config": vllm_config_command}
    pool_directory = POOL_DIRECTORY

    def reads(self, options: Mapping[str, Any]) -> bool:
        return is_transfer_config(options)

    def read(self, options: Mapping[str, Any], *, where: str) -> TieringConfig:
        return read_transfer_config(options, where=where)

    def chunk_keys(
        self, tokens: Sequence[int], facts: Mapping[str, Any], salt: str | None
    ) -> list[list[OffloadKey]]:
        return chunk_keys(tokens, facts, salt)

    def in_its_words(self, message: str) -> str:
        return message.replace("'pool_bytes'", "'cpu_bytes_to_use'")
