from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.command import kvtier


def run(*arguments: str, sites: tuple[Path, ...] = ()) -> subprocess.CompletedProcess[str]:
    return kvtier("backends", *arguments, PYTHONPATH=os.pathsep.join(map(str, sites)))


def backends(*arguments: str, status: int = 0, sites: tuple[Path, ...] = ()) -> dict[str, Any]:
    done = run("--json", *arguments, sites=sites)
    assert (done.returncode, done.stderr) == (status, "")
    listed: dict[str, Any] = json.loads(done.stdout)
    return listed


def test_a_backend_tells_its_package_abilities_and_options() -> None:
    (redis,) = backends("redis")["backends"]
    options = {option.pop("name"): option for option in redis.pop("options")}
    assert redis == {
        "name": "redis",
        "distribution": "kvtier-redis",
        "version": "0.1.0",
        "target": "kvtier_redis:RedisTier",
        "url_schemes": ["redis", "redis+unix", "rediss"],
        "fault": None,
        "summary": "A tier that stores chunks in a Redis or Valkey server, a Sentinel group, or a "
        "Cluster.",
        "contract_version": 1,
        "medium": "STORAGE",
        "locality": "REMOTE",
        "alignment": 1,
        "needs_process": False,
        "max_batch_keys": None,
        "runner_defaults": {},
        "capabilities": ["delete", "touch", "scan", "usage", "namespaces"],
    }
    assert options["connect_timeout"]["unit"] == "seconds"
    assert options["connect_timeout"]["default"] == 2.0
    assert options["password"]["secret"]


def test_the_text_says_the_same() -> None:
    done = run("file", "s3")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "file kvtier-file 0.1.0" in lines
    assert any(line.startswith("contract 1; storage, remote; can: delete, ") for line in lines)
    assert any(line.startswith("min_free size or share 5% free space") for line in lines)
    assert any(line.startswith("load_deadline duration, live 5 s a load that") for line in lines)
    assert not any(line.startswith("memory ") for line in lines)


def test_one_that_cannot_be_loaded_is_listed_with_its_reason(faulty_site: Path) -> None:
    sites = (faulty_site,)
    found = backends(status=1, sites=sites)
    faults = {one["name"]: one["fault"] for one in found["backends"] if one["fault"]}
    assert set(faults) == {"broken", "stranger", "newer"}
    assert "kvtier-faulty 0.0.7 cannot be imported: RuntimeError" in faults["broken"]
    done = run(sites=sites)
    assert done.returncode == 1
    assert f"  cannot be used: {faults['broken']}\n" in done.stdout
    assert "memory  kvtier-sdk" in done.stdout


LOUD = r"""
from typing import Annotated
from pydantic import Field
from kvtier_sdk import ChunkTierManager, TierConfig

class Config(TierConfig):
    mood: Annotated[str, Field(description="fine\x1b[2K\rsecret")] = "\x1b[31m"

class Tier(ChunkTierManager):
    "A store.\x1b[2K\rmemory"
    config_model = Config
    contract_version = 1
    async def contains_chunk(self, key): ...
    async def store_chunk(self, transfer): ...
    async def load_chunk(self, transfer): ...
"""
TORN = r"raise RuntimeError('no\x1b[2K\rdriver\nall is well')"


def test_text_of_a_package_moves_no_cursor_and_begins_no_line(
    install_package: Callable[..., Path],
) -> None:
    points = {"loud": "loud:Tier", "torn": "torn:Tier", "tinted\x1b[31m": "absent\x1b[2K:Tier"}
    site = install_package("kvtier-loud", "0.3", {"loud": LOUD, "torn": TORN}, points)
    listed = run(sites=(site,)).stdout
    refused = kvtier("check", "torn:", PYTHONPATH=str(site)).stdout
    for printed in (listed, refused, run("nothing", sites=(site,)).stderr):
        assert "\x1b" not in printed
        # splitlines() also splits at carriage returns, after which forged output could begin.
        assert not {"driver", "all is well", "secret", "memory"} & set(printed.splitlines())
    torn = r"no\x1b[2K\rdriver\nall is well"
    assert torn in refused
    for text in (
        torn,
        r"A store.\x1b[2K\rmemory",
        r"fine\x1b[2K\rsecret",
        r"tinted\x1b[31m  kvtier-loud",
    ):
        assert text in listed
