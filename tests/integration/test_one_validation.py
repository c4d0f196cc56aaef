from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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


def test_a_tiers_options_are_validated_once_on_each_side(
    tmp_path: Path, install_package: Callable[..., Path]
) -> None:
    points = {"counted": "tier:CountedTier"}
    site = install_package("kvtier-counted", "1.0", {"tier": COUNTED}, points)
    file, diary = tmp_path / "kv.json", tmp_path / "diary"
    tier = {"type": "counted", "runner": "process", "diary": str(diary)}
    file.write_text(json.dumps({"slots": 4, "tiers": [tier]}))
    assert kvtier("check", file, PYTHONPATH=str(site)).returncode == 0
    pids = diary.read_text().split()
    assert len(pids) == len(set(pids)) == 2
