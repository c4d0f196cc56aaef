from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier

from kvtier_sdk import Medium

yaml = pytest.importorskip("yaml")

FLEET = Path(__file__).parents[2] / "examples/fleet"


def loaded(name: str) -> Any:
    return yaml.safe_load((FLEET / name).read_text())


def argument(words: list[str]) -> str:
    return words[words.index("--kv-transfer-config") + 1]


def accepted(config: str, tmp_path: Path) -> dict[str, Any]:
    """Assert that ``kvtier check`` accepts a transfer config; return its options."""
    path = tmp_path / "kv.json"
    path.write_text(config)
    done = kvtier("check", "--no-dry-run", path)
    assert done.returncode == 0, done.stderr
    options: dict[str, Any] = json.loads(config)["kv_connector_extra_config"]
    return options


@pytest.mark.parametrize("name", ["node-local.json", "two-degrees.json"])
def test_the_configurations_are_accepted(name: str, tmp_path: Path) -> None:
    accepted((FLEET / name).read_text(), tmp_path)


def test_llm_ds_router_subscribes_to_what_the_engine_publishes(tmp_path: Path) -> None:
    router, engine = loaded("llm-d-epp.yaml"), loaded("llm-d-engine.yaml")
    plugins = {one["type"]: one.get("parameters", {}) for one in router["plugins"]}
    producer = plugins["precise-prefix-cache-producer"]
    assert set(producer) == {"tokenProcessorConfig", "kvEventsConfig", "indexerConfig"}
    assert producer["kvEventsConfig"]["podDiscoveryConfig"] == {"socketPort": 5557}
    options = accepted(argument(engine["command"] + engine["args"]), tmp_path)
    assert options["events_endpoint"] == "tcp://*:5557"
    assert options["events_tokens"]
    prefix, place, model = options["events_topic"].split("@")
    assert f"{prefix}@" == producer["kvEventsConfig"]["topicFilter"]
    port = engine["command"][engine["command"].index("--port") + 1]
    assert place == f"$({engine['env'][0]['name']}):{port}"
    assert model == engine["command"][2] == plugins["token-producer"]["modelName"]
    weights = {one["name"] for one in producer["indexerConfig"]["kvCacheBackendConfigs"]}
    assert weights == {Medium.CPU.value.lower(), Medium.STORAGE.value.lower()}
    (profile,) = router["schedulingProfiles"]
    assert {one["pluginRef"] for one in profile["plugins"]} <= set(plugins)


def test_the_production_stacks_engine_has_room_for_its_pool_and_its_root(tmp_path: Path) -> None:
    values = loaded("production-stack.yaml")
    (model,) = values["servingEngineSpec"]["modelSpec"]
    options = accepted(argument(model["vllmConfig"]["extraArgs"]), tmp_path)
    assert options["secondary_tiers"][0]["root"] == model["extraVolumeMounts"][0]["mountPath"]
    assert int(model["shmSize"].removesuffix("Gi")) > int(
        options["cpu_bytes_to_use"].removesuffix("GiB")
    )
    assert values["routerSpec"] == {"routingLogic": "session", "sessionKey": "x-session-id"}
