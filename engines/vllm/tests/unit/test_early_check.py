"""Tests of the checks before a worker starts; tests/integration/messages.txt has the messages."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import ConfigError
from kvtier_vllm.early_check import check_engine

OURS = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier_vllm",
    "cpu_bytes_to_use": "1MiB",
    "model_revision": "v1",
}
THEIRS = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 1 << 20,
    "secondary_tiers": [{"type": "kvtier", "backend": "memory", "model_revision": "v1"}],
}


def check(extra: Any, connector: str = "OffloadingConnector") -> None:
    options = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    check_engine(options, "a-model", Path("/nonexistent"))


@pytest.mark.parametrize("extra", [OURS, THEIRS])
def test_a_sound_configuration_passes(extra: dict[str, Any]) -> None:
    check(extra)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": "nonsense"},
        {**THEIRS, "secondary_tiers": [{"type": "fs", "root": 5}]},
        {**THEIRS, "secondary_tiers": "nonsense"},
        {**THEIRS, "spec_name": "KVTierCPUTieringSpec", "secondary_tiers": [{"type": "fs"}]},
        {**OURS, "spec_name": "MyKVTierSpec", "spec_module_path": "mine", "colour": "red"},
    ],
)
def test_what_is_not_ours_is_left_to_vllm(extra: dict[str, Any]) -> None:
    check(extra)


def test_another_connector_is_left_to_vllm() -> None:
    check({**OURS, "colour": "red"}, connector="LMCacheConnectorV1")


def test_a_connector_among_others_is_checked() -> None:
    others: list[Any] = ["nonsense", {"kv_connector": "ExampleConnector"}]
    ours = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    check({"connectors": 5}, "MultiConnector")
    check({"connectors": [*others, {**ours, "kv_connector_extra_config": OURS}]}, "MultiConnector")
    wrong = {**ours, "kv_connector_extra_config": {**OURS, "colour": "red"}}
    with pytest.raises(ConfigError, match="unknown option 'colour'"):
        check({"connectors": [*others, wrong]}, "MultiConnector")


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({**OURS, "colour": "red"}, "unknown option 'colour'"),
        ({**OURS, "secondary_tiers": ["memory:?capcity=1GiB"]}, "did you mean 'capacity'"),
        ({**OURS, "cpu_bytes_to_use": "1EiB"}, "the host pool needs 1 EiB"),
        ({**OURS, "model_revision": None}, "the revision of a-model cannot be determined"),
        ({"spec_name": "kvtier"}, "allowed: KVTierCPUTieringSpec, KVTierOffloadingSpec"),
    ],
)
def test_a_mistake_is_told(extra: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check(extra)


def test_a_replicas_port_in_use_names_its_owner() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
        extra = {**OURS, "metrics_port": port - 1}
        with pytest.raises(ConfigError, match=rf"port {port}: .*, by process {os.getpid()} \("):
            check_engine(
                {**options, "kv_connector_extra_config": extra}, "m", Path("/"), range(1, 2)
            )
