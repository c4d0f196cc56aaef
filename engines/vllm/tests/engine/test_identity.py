import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm_config import CHUNK_BYTES, make_config, opened_manager
    from vllm_platform import on_platform

    from kvtier_sdk import ConfigError
    from kvtier_vllm import compat, plugin
    from kvtier_vllm.identity import OUR_SLOTS, Identity
    from kvtier_vllm.options import IdentityOptions


def facts_of(config: OffloadingConfig, **declared: str) -> dict[str, Any]:
    identity = Identity(
        config, chunk_bytes=CHUNK_BYTES, slot_layout=OUR_SLOTS, declared=IdentityOptions(**declared)
    )
    return dict(identity.namespace.facts)


def config_of(dtype: str) -> OffloadingConfig:
    config = make_config([])
    group = replace(config.groups[0], tokens_per_block=128)
    return replace(config, groups=(group,), model=replace(config.model, dtype=dtype))


def test_a_release_shares_with_another_if_the_operator_says_so() -> None:
    config = config_of("float32")
    own = facts_of(config)
    assert own["engine"] == f"vllm {compat.release()}"
    assert facts_of(config, kv_release="0.31") == {**own, "engine": "vllm 0.31"}


@pytest.mark.parametrize(
    ("dtype", "shared"), [("float32", True), ("bfloat16", False), ("fp8_e4m3", False)]
)
def test_sharing_between_cpus(monkeypatch: pytest.MonkeyPatch, dtype: str, shared: bool) -> None:
    on_platform(monkeypatch, "cpu", "cpu")
    facts = []
    for has_amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda has_amx=has_amx: has_amx)
        facts.append(facts_of(config_of(dtype)))
    assert (facts[0] == facts[1]) is shared


def test_cpus_of_two_architectures_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    on_platform(monkeypatch, "cpu", "cpu")
    facts = []
    for machine in ("x86_64", "loongarch64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        facts.append(facts_of(config_of("float32")))
    assert facts[0] != facts[1]


def test_a_release_without_the_choice_uses_the_cpus_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import cpu_attn

    on_platform(monkeypatch, "cpu", "cpu")
    monkeypatch.delattr(cpu_attn, "_get_attn_isa")
    _, *packing = facts_of(config_of("bfloat16"))["kv_packing"]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next(line for line in lines if line.startswith(("flags", "Features")))
    assert packing == sorted(flags.split(":")[1].split())


def test_platforms_that_torch_calls_alike_do_not_share(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = []
    for name in ("cuda", "rocm"):
        on_platform(monkeypatch, name, "cuda")
        facts.append(facts_of(config_of("bfloat16")))
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    facts.append(facts_of(config_of("bfloat16")))
    assert facts[0] != facts[1] != facts[2]


def test_a_model_of_the_hub_that_cannot_be_told_from_others_needs_a_revision() -> None:
    config = config_of("float32")
    config = replace(config, model=replace(config.model, name="none/such"))
    with pytest.raises(ConfigError, match="option 'model_revision' is missing"):
        facts_of(config)
    assert facts_of(config, model_revision="v2")["model_revision"] == "v2"


#: Way "a" is vLLM's manager with kvtier's tiers. Way "b" is kvtier's manager.
WAYS: dict[str, dict[str, Any]] = {
    "a": {"spec_name": "TieringOffloadingSpec"},
    "a on CPUs": {"spec_name": "KVTierCPUTieringSpec"},
    "b": {"spec_name": "KVTierOffloadingSpec"},
    "b with our copies": {"spec_name": "KVTierOffloadingSpec", "copies": "kvtier"},
}


def namespace_of(way: str, root: Path) -> str:
    tier = {"type": "kvtier", "backend": "file", "root": str(root)}
    config = make_config([tier], cpu_bytes_to_use=8 * CHUNK_BYTES, **WAYS[way])
    plugin.register()
    with opened_manager(config):
        pass
    (manifest,) = root.rglob("manifest.json")
    fingerprint: str = json.loads(manifest.read_text())["fingerprint"]
    return fingerprint


@pytest.mark.parametrize(
    ("platform", "ways", "shared"),
    [
        ("cpu", ("a on CPUs", "b"), True),
        ("cpu", ("b", "b with our copies"), True),
        ("cuda", ("a", "b"), True),
        ("cuda", ("a", "a on CPUs"), True),
        ("cuda", ("b", "b with our copies"), False),
        ("cuda", ("a", "b with our copies"), False),
    ],
)
def test_engines_share_where_one_worker_fills_their_slots(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    ways: tuple[str, str],
    shared: bool,
) -> None:
    on_platform(monkeypatch, platform, platform)
    one, other = (namespace_of(way, tmp_path / way) for way in ways)
    assert (one == other) is shared


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        ("model.layers.0.self_attn.attn", "bfloat16"),
        ("model.layers.0.self_attn.mla_attn", "bfloat16"),
        ("model.layers.0.self_attn.indexer.k_cache", "unknown"),
        ("model.layers.0.linear_attn", "unknown"),
        ("model.layers.0.mixer", "unknown"),
    ],
)
def test_a_dtype_is_that_of_keys_and_values_alone(layer: str, dtype: str) -> None:
    config = config_of("bfloat16")
    group = replace(config.groups[0], layer_names=("model.layers.1.self_attn.attn", layer))
    assert facts_of(replace(config, groups=(group,)))["dtype"] == dtype
