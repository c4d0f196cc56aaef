"""The pod of deploy/kubernetes, run on a CPU: secrets, start, probes, metrics and tiers."""

import os
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from support.redis_server import Server, free_port
from vllm_server import (
    OPTIONS,
    VARIABLES,
    complete,
    make_model,
    make_words,
    metric,
    name_vllm,
    serving,
    wait_for,
)

DEPLOY = Path(__file__).parents[4] / "deploy" / "kubernetes"
CHUNKS = 3


def get(port: int, path: str) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return int(answer.status)


def test_the_pod_starts_and_answers_its_probes(tmp_path: Path) -> None:
    model, secrets = tmp_path / "model", tmp_path / "secrets"
    make_model(model)
    name_vllm(tmp_path / "site")
    for place in ("run", "etc", "secrets"):
        (tmp_path / place).mkdir()
    (secrets / "redis-password").write_text("hunter2\n")
    (secrets / "chunk.keys").write_text("11" * 32 + "\n")
    for secret in secrets.iterdir():
        secret.chmod(0o440)  # fsGroup changes mode 0400 to 0440
    port, metrics_port = free_port(), free_port()
    store = Server(tmp_path / "redis").start()
    store.ask("ACL", "SETUSER", "kvtier", "on", ">hunter2", "~*", "&*", "+@all")
    places = {
        "/run/secrets/kvtier": secrets,
        "/run/kvtier": tmp_path / "run",
        "/etc/kvtier": tmp_path / "etc",
        "/data/kv": tmp_path / "kv",
        "redis:6379": f"127.0.0.1:{store.port}",
        "8000": port,
        "9400": metrics_port,
        "200GiB": "1GiB",
        "32GiB": "256MiB",
    }

    def here(text: str) -> str:
        for place, own in places.items():
            text = text.replace(place, str(own))
        return text

    (tmp_path / "etc/kv.json").write_text(here((DEPLOY / "kv.json").read_text()))
    pod: dict[str, Any] = yaml.safe_load(here((DEPLOY / "engine.yaml").read_text()))
    pod = pod["spec"]["template"]["spec"]
    (first,), (engine,) = pod["initContainers"], pod["containers"]
    subprocess.run([*first["command"], *first["args"]], check=True)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "run/secrets").iterdir()} == {0o400}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, **VARIABLES, "PATH": path, "PYTHONPATH": str(tmp_path / "site")}
    variables |= {one["name"]: one["value"] for one in engine["env"]}
    variables |= {"MODEL": str(model), "HOME": str(tmp_path)}
    variables["VLLM_OPTIONS"] = f"{OPTIONS} --max-model-len 1024"
    ports = {one["name"]: one["containerPort"] for one in engine["ports"]}
    command = shlex.join([*engine["command"], *engine["args"]])
    try:
        with serving(command, variables, tmp_path, ports["http"]):
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                asked = engine[probe]["httpGet"]
                assert get(ports[asked["port"]], asked["path"]) == 200
            complete(port, str(model), make_words(0, CHUNKS * 128 + 5))
            for tier in ("file", "redis"):
                wait_for(ports["kvtier-metrics"], "kvtier_stored_chunks_total", CHUNKS, tier=tier)
            store.kill()
            assert get(port, "/health") == 200
            assert metric(ports["kvtier-metrics"], "kvtier_tier_open", tier="file") == 1
    finally:
        store.kill()
