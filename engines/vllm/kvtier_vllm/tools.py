"""vLLM for the command ``kvtier``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kvtier_sdk import OffloadKey, TieringConfig
from kvtier_sdk.engine import EngineTools
from kvtier_vllm.block_hashes import chunk_keys
from kvtier_vllm.command import vllm_config_command
from kvtier_vllm.transfer_config import POOL_DIRECTORY, is_transfer_config, read_transfer_config


class VLLMTools(EngineTools):
    """Reads vLLM's ``kv_transfer_config``, computes its keys, and writes its configuration."""

    commands: ClassVar[Mapping[str, Callable[..., None]]] = {"vllm-config": vllm_config_command}
    pool_directory = POOL_DIRECTORY

    def reads(self, options: Mapping[str, Any]) -> bool:
        return is_transfer_config(options)

    def read(self, options: Mapping[str, Any], *, where: str) -> TieringConfig:
        return read_transfer_config(options, where=where)

    def chunk_keys(self, tokens: Sequence[int], facts: Mapping[str, Any]) -> list[list[OffloadKey]]:
        return chunk_keys(tokens, facts)

    def in_its_words(self, message: str) -> str:
        return message.replace("'pool_bytes'", "'cpu_bytes_to_use'")
