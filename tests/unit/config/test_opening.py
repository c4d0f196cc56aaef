from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import ConfigError, HostPool, Namespace, TieringConfig, TierSpec
from kvtier_sdk.engine import TieringManager, TierListener, open_manager, open_pool, open_tier
from kvtier_sdk.pool.limits import total_memory_bytes


def test_a_pool_is_as_big_as_configured() -> None:
    with open_pool(TieringConfig.from_dict({"slots": 3}), chunk_bytes=100) as pool:
        assert (pool.slots, pool.chunk_bytes) == (3, 100)
    rows = TieringConfig.from_dict({"pool_bytes": "20KB", "chunk_bytes": "5000"})
    with open_pool(rows) as pool:
        assert (pool.slots, pool.chunk_bytes) == (2, 5000), "a row is 8,192 bytes"


def test_a_share_is_one_of_the_memory() -> None:
    config = TieringConfig.from_dict({"pool_bytes": "0.1%", "chunk_bytes": "1MiB"})
    with open_pool(config) as pool:
        assert pool.slots == total_memory_bytes() // 1000 // 2**20


@pytest.mark.parametrize(
    ("options", "chunk_bytes", "message"),
    [
        ({"slots": 3}, None, "option 'chunk_bytes' is missing"),
        ({"slots": 3, "chunk_bytes": 64}, 65, "option 'chunk_bytes' is 64, but the engine's chu"),
        ({"pool_bytes": 4095}, 64, "option 'pool_bytes' is 3.999 KiB, less than one slot of 4 KiB"),
        ({"slots": 10**9}, 2**20, "make the pool smaller"),
    ],
)
def test_a_pool_that_cannot_be_made_says_why(
    options: dict[str, Any], chunk_bytes: int | None, message: str
) -> None:
    config = TieringConfig.from_dict(options)
    with pytest.raises(ConfigError, match=message), open_pool(config, chunk_bytes=chunk_bytes):
        raise AssertionError("there is no such pool")


def memory_of(root: Path, group: str | None, limits: Mapping[str, str]) -> int:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemTotal:    8 kB\n")
    if group is not None:
        (proc / "self" / "cgroup").write_text(f"0::/{group}\n")
    for directory, text in limits.items():
        (groups / directory).mkdir(parents=True, exist_ok=True)
        (groups / directory / "memory.max").write_text(text)
        (groups / directory / "memory.current").write_text("100\n")
    return total_memory_bytes(proc, groups)


@pytest.mark.parametrize(
    ("group", "limits", "size_bytes"),
    [
        (None, {}, 8192),
        ("a/b", {}, 8192),
        ("a/b", {"a/b": "max\n"}, 8192),
        ("a/b", {"a/b": "4096\n"}, 4096),
        ("a/b", {"a": "4096\n", "a/b": "max\n"}, 4096),
        ("a/b", {"a": "4096\n", "a/b": "512\n"}, 512),
        ("a/b", {"a/b": "9000\n"}, 8192),
        ("", {".": "4096\n"}, 4096),
    ],
)
def test_memory_is_what_the_container_may_take(
    tmp_path: Path, group: str | None, limits: Mapping[str, str], size_bytes: int
) -> None:
    assert memory_of(tmp_path, group, limits) == size_bytes


def test_facts_are_added_to_the_engines() -> None:
    config = TieringConfig.from_dict({"slots": 3, "namespace": {"model": "m", "tag": "x"}})
    bound = config.bind(Namespace({"model": "m", "dtype": "bfloat16"}))
    assert bound == Namespace({"model": "m", "dtype": "bfloat16", "tag": "x"})
    with pytest.raises(
        ConfigError, match="'namespace.model' is 'm', but the engine says 'other'; leave it out"
    ):
        config.bind(Namespace({"model": "other"}))


def test_if_one_tier_rounds_all_tiers_have_a_namespace_of_rounded_chunks() -> None:
    for compress, facts in (("always", {}), ("fp8", {"compress": "fp8"})):
        tiers = ["memory:?name=one", f"memory:?name=two&compress={compress}"]
        config = TieringConfig.from_dict({"slots": 1, "tiers": tiers})
        for spec in config.tiers:
            assert spec.in_tier(Namespace({"model": "m"})) == Namespace({"model": "m", **facts})


def test_a_tier_that_rounds_is_not_opened_alone_unless_its_namespace_says_so() -> None:
    pool = HostPool(1, 4096)
    for facts in ({"compress": "fp8"}, {}):
        opening = open_tier("memory:?compress=fp8", pool, Namespace(facts), TierListener())
        refused = pytest.raises(ConfigError, match="option 'namespace'")
        with nullcontext() if facts else refused, opening:
            pass
    pool.close()


@pytest.mark.parametrize("verify", [True, False])
def test_a_tier_opened_alone_makes_digests_as_its_specification_says(verify: bool) -> None:
    spec = replace(TierSpec.from_url("memory:"), verify=verify)
    pool = HostPool(1, 4096)
    with open_tier(spec, pool, Namespace({}), TierListener()) as tier:
        assert tier.spec.verify is verify
    pool.close()


def test_a_manager_is_made_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []
    real = TieringManager.shutdown

    def noting(manager: TieringManager, timeout_s: float) -> None:
        timeouts.append(timeout_s)
        real(manager, timeout_s)

    monkeypatch.setattr(TieringManager, "shutdown", noting)
    options = {
        "slots": 40,
        "chunk_bytes": 64,
        "store_reserve": "25%",
        "policy": "arc",
        "recompute": "5ms",
        "shutdown_timeout": "7s",
        "namespace": {"tag": "configured"},
        "tiers": [f"file://{tmp_path}/kv", {"type": "memory", "store_policy": "on_evict"}],
    }
    config = TieringConfig.from_dict(options)
    with open_pool(config) as pool, open_manager(pool, config, Namespace({"x": 1})) as manager:
        assert [stats.name for stats in manager.stats[1:]] == ["file", "memory"]
        assert manager.headroom_slots == 10
        assert manager.stats[0].recompute_s == 0.005
        assert type(manager._policy).__name__ == "ARCPolicy"
    assert timeouts == [7.0]
    (manifest,) = (tmp_path / "kv").rglob("manifest.json")
    facts = json.loads(manifest.read_text())["facts"]
    assert (facts["tag"], facts["x"]) == ("configured", 1)


def test_a_manager_refuses_a_pool_of_other_chunks() -> None:
    config = TieringConfig.from_dict({"slots": 3, "chunk_bytes": 64})
    pool = HostPool(3, 128)
    with (
        pytest.raises(ConfigError, match="option 'chunk_bytes' is 64"),
        open_manager(pool, config, Namespace({})),
    ):
        raise AssertionError("there is no such manager")
    pool.close()


def test_only_tiers_are_a_configuration_too() -> None:
    pool = HostPool(3, 128)
    with open_manager(pool, ["memory:"], Namespace({})) as manager:
        assert [stats.name for stats in manager.stats[1:]] == ["memory"]
    pool.close()


def test_a_queue_that_no_chunk_fits_into_is_told() -> None:
    pool = HostPool(1, 4096)
    try:
        with (
            pytest.raises(ConfigError) as caught,
            open_manager(pool, ["memory:?max_queue=1KiB"], Namespace({})),
        ):
            pass
    finally:
        pool.close()
    assert str(caught.value) == (
        "tier 'memory': option 'max_queue' is 1 KiB, less than one chunk of 4 KiB; give it at "
        "least that, or leave it out"
    )
