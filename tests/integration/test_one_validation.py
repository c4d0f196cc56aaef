"""A tier's options are validated once in the engine and once in the tier's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier

#: A tier whose options record the process that validates them.
COUNTED = """
import os
from typing import Self
from pydantic import model_validator
from kvtier_sdk import MemoryTier, MemoryTierConfig


class CountedConfig(MemoryTierConfig):
    diary: str

    @model_validator(mode="after")
    def note(self) -> Self:
        with open(self.diary, "a", encoding="utf-8") as diary:
            diary.write(f"{os.getpid()}\\n")
        return self


class CountedTier(MemoryTier):
    config_model = CountedConfig
    config: CountedConfig
"""


@pytest.fixture(scope="module")
def site(install_package: Callable[..., Path]) -> Path:
    entry_points = {"counted": "tier:CountedTier"}
    return install_package("kvtier-counted", "1.0", {"tier": COUNTED}, entry_points)


@pytest.fixture
def tier(tmp_path: Path) -> dict[str, Any]:
    return {"type": "counted", "runner": "process", "diary": str(tmp_path / "diary")}


def once_on_each_side(tier: Mapping[str, Any]) -> bool:
    pids = Path(tier["diary"]).read_text().split()
    return len(pids) == len(set(pids)) == 2


def of_vllm(spec: str, tier: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": spec,
            "spec_module_path": "kvtier_vllm",
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [{**tier, "type": "kvtier", "backend": "counted"}],
        },
    }


@pytest.mark.parametrize(
    "write",
    [
        lambda tier: {"slots": 4, "tiers": [tier]},
        lambda tier: of_vllm("KVTierOffloadingSpec", tier),
        lambda tier: of_vllm("TieringOffloadingSpec", tier),
    ],
    ids=["ours", "our manager", "vLLM's manager"],
)
def test_by_check(
    write: Callable[..., Any], tier: dict[str, Any], tmp_path: Path, site: Path
) -> None:
    file = tmp_path / "kv.json"
    file.write_text(json.dumps(write(tier)))
    assert kvtier("check", file, PYTHONPATH=str(site)).returncode == 0
    assert once_on_each_side(tier)
