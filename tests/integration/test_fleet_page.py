"""The files of the page for fleets are accepted as they stand, agree with each other, and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from support.command import kvtier
from support.server import free_port

from kvtier_sdk import Locality, Medium, SystemClock, make_offload_key

yaml = pytest.importorskip("yaml")

FLEET = Path(__file__).parents[2] / "examples/fleet"
MODEL, BLOCK_TOKENS = "m", 16


def loaded(name: str) -> Any:
    return yaml.safe_load((FLEET / name).read_text())


def argument(words: list[str]) -> str:
    return words[words.index("--kv-transfer-config") + 1]


def accepted(config: str, tmp_path: Path) -> dict[str, Any]:
    """Return the options of a transfer config that ``kvtier check`` accepts."""
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


def answer(url: str, question: Any = None) -> Any:
    body = None if question is None else json.dumps(question).encode()
    request = Request(url, body, {"Content-Type": "application/json"})
    with urlopen(request, timeout=10) as reply:
        return json.load(reply)


def awaited(found: Callable[[], Any], wanted: Any) -> None:
    last = None
    for _ in range(150):
        try:
            last = found()
        except OSError as error:
            last = error
        if last == wanted:
            return
        time.sleep(0.2)
    assert last == wanted


def test_dynamos_indexer_learns_what_engines_had_before_it_started() -> None:
    for module, package in (("zmq", "pyzmq"), ("dynamo.indexer", "ai-dynamo ai-dynamo-runtime")):
        pytest.importorskip(module, reason=f"Dynamo's indexer is not here: pip install {package}")
    from kvtier_sdk.event_publisher import EventPublisher
    from kvtier_sdk.events import ChunkNote, OffloadingEvent

    hosts = ["127.0.0.2", "127.0.0.3"]
    engines = [
        EventPublisher(
            *(f"tcp://{host}:{port}" for port in (5557, 5558)),
            topic="",
            tokens=True,
            rank=0,
            clock=SystemClock(),
        )
        for host in hosts
    ]
    prompt = list(range(2 * BLOCK_TOKENS))
    first, second = (make_offload_key(bytes([number]) * 32, 0) for number in (1, 2))
    notes = [
        ChunkNote([1], None, prompt[:BLOCK_TOKENS], BLOCK_TOKENS).encode(),
        ChunkNote([2], 1, prompt[BLOCK_TOKENS:], BLOCK_TOKENS).encode(),
    ]
    disk, bucket = (Medium.STORAGE, Locality.LOCAL), (Medium.STORAGE, Locality.REMOTE)
    pool = (Medium.CPU, Locality.LOCAL)
    engines[0].put(OffloadingEvent([first, second], "file", *disk, False, notes))
    engines[1].put(OffloadingEvent([first], "host", *pool, False, notes[:1]))
    engines[1].put(OffloadingEvent([first, second], "s3", *bucket, False, notes))
    port = free_port()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = subprocess.Popen(
        ["sh", FLEET / "dynamo-indexer.sh", MODEL, str(BLOCK_TOKENS), *hosts],
        env={**os.environ, "PATH": path, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def tokens() -> dict[str, tuple[int, int]]:
        question = {"model_name": MODEL, "token_ids": prompt}
        found = answer(f"http://127.0.0.1:{port}/query", question)["instances"]
        return {number: (one["cpu"], one["disk"]) for number, one in found.items()}

    try:
        # What is in the host pool counts for the disk too.
        awaited(tokens, {"1": (0, 32), "2": (16, 16)})
        engines[0].put(OffloadingEvent([second], "file", *disk, True))
        awaited(tokens, {"1": (0, 16), "2": (16, 16)})
    finally:
        script.terminate()
        script.wait(timeout=30)
        for engine in engines:
            engine.close()
