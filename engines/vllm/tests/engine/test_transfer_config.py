"""``kvtier check`` refuses the same transfer configs that vLLM refuses when it starts."""

import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    from kvtier_sdk import ConfigError
    from kvtier_vllm import plugin
    from kvtier_vllm.transfer_config import read_transfer_config

OURS = "kvtier_vllm"
TIER = {"type": "kvtier", "backend": "memory"}
BY_CLASS = {**TIER, "type": "KVTierSecondaryTier"}
HOST = {"spec_name": "KVTierOffloadingSpec", "secondary_tiers": ["memory:"]}
GUEST = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [TIER]}
ON_CPU = {**GUEST, "spec_name": "KVTierCPUTieringSpec"}

#: Each case is an extra config, and the other keys of the transfer config.
ACCEPTED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({**HOST, "spec_module_path": OURS}, {}),
    ({**HOST, "spec_module_path": f"{OURS}.spec"}, {}),
    ({**HOST, "spec_module_path": "passes_ours_on"}, {}),
    ({**HOST, "spec_module_path": OURS, "sync_load_budget_bytes": 1}, {"kv_role": "kv_producer"}),
    ({**HOST, "spec_module_path": OURS}, {"kv_port": "1", "kv_load_failure_policy": "recompute"}),
    ({**HOST, "spec_module_path": OURS}, {"engine_id": None, "kv_buffer_device": "cpu"}),
    (GUEST, {}),
    ({**GUEST, "spec_module_path": "of.nothing"}, {"enable_permute_local_kv": "no"}),
    ({**GUEST, "store_threshold": 2, "tier_poll_interval_s": 1, "of_another_release": 1}, {}),
    ({**GUEST, "secondary_tiers": [{**TIER, "module_path": "of.nothing"}]}, {}),
    ({**GUEST, "secondary_tiers": [{**BY_CLASS, "module_path": OURS}]}, {}),
    ({**GUEST, "secondary_tiers": [{**BY_CLASS, "module_path": f"{OURS}.secondary_tier"}]}, {}),
    ({**ON_CPU, "spec_module_path": OURS}, {}),
    ({**ON_CPU, "spec_module_path": f"{OURS}.cpu_tiering"}, {}),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (HOST, {}),
    ({**HOST, "spec_module_path": None}, {}),
    ({**HOST, "spec_module_path": ""}, {}),
    ({**HOST, "spec_module_path": 1}, {}),
    ({**HOST, "spec_module_path": ".spec"}, {}),
    ({**HOST, "spec_module_path": "kvtier_sdk"}, {}),
    ({**HOST, "spec_module_path": "kvtier_sdk.vllm"}, {}),
    ({**HOST, "spec_module_path": "kvtier.integrations.vllm"}, {}),
    ({**HOST, "spec_module_path": f"{OURS}.cpu_tiering"}, {}),
    ({**HOST, "spec_module_path": "fails.below"}, {}),
    ({**HOST, "spec_module_path": OURS, "spec_name": ["KVTierOffloadingSpec"]}, {}),
    (ON_CPU, {}),
    ({**GUEST, "secondary_tiers": [BY_CLASS]}, {}),
    ({**GUEST, "secondary_tiers": [{**BY_CLASS, "module_path": "kvtier_sdk.elsewhere"}]}, {}),
    (GUEST, {"kv_role": None}),
    (GUEST, {"kv_role": "both"}),
    (GUEST, {"kv_rol": "kv_both"}),
    (GUEST, {"kv_port": "many"}),
    (GUEST, {"kv_buffer_device": None}),
    (GUEST, {"kv_load_failure_policy": "retry"}),
    (GUEST, {"cpu_bytes_to_use": 1 << 20}),
]


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "passes_ours_on.py").write_text(f"from {OURS} import KVTierOffloadingSpec")
    (tmp_path / "fails").mkdir()
    (tmp_path / "fails/__init__.py").write_text("raise RuntimeError")
    monkeypatch.syspath_prepend(tmp_path)


def refusals(extra: dict[str, Any], further: dict[str, Any]) -> tuple[str | None, str | None]:
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **further}
    config["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 20, **extra}
    theirs = ours = None
    try:
        start_as_vllm_does(config)
    except Exception as error:
        theirs = repr(error)
    try:
        read_transfer_config(config, where="kv.json")
    except ConfigError as error:
        ours = str(error)
    return theirs, ours


def start_as_vllm_does(config: dict[str, Any]) -> None:
    plugin.register()
    read = KVTransferConfig(**config)
    KVConnectorFactory.get_connector_class(read)
    OffloadingSpecFactory.get_spec_cls(read.kv_connector_extra_config)
    for entry in read.kv_connector_extra_config["secondary_tiers"]:
        if isinstance(entry, dict):
            SecondaryTierFactory.get_tier_class(entry)


@pytest.mark.parametrize(("extra", "further"), ACCEPTED)
def test_what_vllm_takes_is_right(extra: dict[str, Any], further: dict[str, Any]) -> None:
    assert refusals(extra, further) == (None, None)


@pytest.mark.parametrize(("extra", "further"), REFUSED)
def test_what_vllm_refuses_is_wrong(extra: dict[str, Any], further: dict[str, Any]) -> None:
    assert None not in refusals(extra, further)


def test_every_option_of_this_release_is_known() -> None:
    # Pass an unknown option, because its error message lists all known options.
    _, complaint = refusals(GUEST, {"?": 1})
    assert complaint is not None
    allowed = complaint.partition("allowed: ")[2].split(", ")
    assert allowed == sorted(field.name for field in fields(KVTransferConfig))
