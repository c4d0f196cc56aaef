"""A tier's options are validated once in the engine and once in the tier's process."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.author import run

from kvtier_sdk import HostPool, Namespace, PoolLayout, RunnerOptions, SystemClock, TieringConfig
from kvtier_sdk.engine import open_manager, open_pool
from kvtier_sdk.options.model import validate_options
from kvtier_sdk.runner.factory import make_runner
from kvtier_vllm.options import EXTRA_CONFIG, SecondaryTierEntry, SpecOptions

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
NAMESPACE = Namespace({"model": "m"})


@pytest.fixture(scope="module")
def site(install_package: Callable[..., Path]) -> Iterator[Path]:
    entry_points = {"counted": "tier:CountedTier"}
    site = install_package("kvtier-counted", "1.0", {"tier": COUNTED}, entry_points)
    sys.path.insert(0, str(site))
    yield site
    sys.path.remove(str(site))


@pytest.fixture
def tier(site: Path, tmp_path: Path) -> dict[str, Any]:
    return {"type": "counted", "runner": "process", "diary": str(tmp_path / "diary")}


def once_on_each_side(tier: Mapping[str, Any]) -> bool:
    pids = Path(tier["diary"]).read_text().split()
    return len(pids) == len(set(pids)) == 2


def open_tiers(config: TieringConfig) -> None:
    with open_pool(config, chunk_bytes=64) as pool, open_manager(pool, config, NAMESPACE):
        pass


def test_from_code(tier: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def note(options: object) -> RunnerOptions:
        read.append(options)
        return validate(options)

    validate = RunnerOptions.model_validate
    monkeypatch.setattr(RunnerOptions, "model_validate", note)
    open_tiers(TieringConfig.from_dict({"slots": 4, "tiers": [tier]}))
    assert once_on_each_side(tier)
    assert len(read) == 1, "the other one is in the tier's process"


def test_under_vllms_manager(tier: dict[str, Any], tmp_path: Path) -> None:
    names = ("first", "second", "third")
    tiers = [{**tier, "name": name, "diary": str(tmp_path / name)} for name in names]
    entries = [{**one, "type": "kvtier", "backend": "counted"} for one in tiers]
    spec = SimpleNamespace(extra_config={"secondary_tiers": entries})
    pool = HostPool.create(PoolLayout(1, 64))
    for options in entries:
        own = {name: value for name, value in options.items() if name != "type"}
        entry = SecondaryTierEntry.of_tier(spec, own)
        runner = make_runner(entry.tier, pool, namespace=NAMESPACE, clock=SystemClock())
        runner.start()
        runner.close(5.0)
    pool.close()
    assert all(map(once_on_each_side, tiers))


def test_under_our_manager_in_vllm(tier: dict[str, Any]) -> None:
    extra = {"cpu_bytes_to_use": "64KiB", "secondary_tiers": [tier]}
    _, of_scheduler = (validate_options(SpecOptions, extra, EXTRA_CONFIG) for _ in range(2))
    assert not Path(tier["diary"]).exists()
    update = {"tiers": of_scheduler.read_tiers()}
    open_tiers(of_scheduler.config.model_copy(update=update))
    assert once_on_each_side(tier)


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
    kvtier("check", str(file), site=site)
    assert once_on_each_side(tier)


def test_by_a_replay_whose_flags_win_over_its_file(
    tier: dict[str, Any], tmp_path: Path, site: Path
) -> None:
    file = tmp_path / "kv.json"
    file.write_text(json.dumps({"slots": 4, "tiers": ["memory:"]}))
    url = f"counted:?runner=process&diary={tier['diary']}"
    kvtier("replay", "--requests", "1", "--config", str(file), "--tier", url, site=site)
    assert once_on_each_side(tier)


def kvtier(*arguments: str, site: Path) -> None:
    command = [sys.executable, "-P", "-c", "from kvtier_sdk.cli import main; main()", *arguments]
    run(command, site, os.environ | {"PYTHONPATH": str(site)})
