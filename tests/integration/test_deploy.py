from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.command import kvtier

pytestmark = pytest.mark.reader

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes"
KSERVE = ROOT / "deploy" / "kserve" / "llm-inference-service.yaml"
USER = 1000


def kubectl() -> str:
    found = shutil.which("kubectl") or shutil.which("kubectl", path=ROOT / ".kubectl/usr/bin")
    assert found is not None, "kubectl is missing: try 'make kubectl'"
    return found


def walk(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    for part in value if isinstance(value, list) else ():
        yield from walk(part)


def bytes_of(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([GM])iB?", size).groups()  # type: ignore[union-attr]
    return int(number) << {"M": 20, "G": 30}[unit]


def image() -> str:
    versions = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return f"registry.example/vllm-kvtier:{versions['version']}"


@pytest.fixture(scope="module")
def rendered() -> dict[str, dict[str, Any]]:
    built = subprocess.run(
        [kubectl(), "kustomize", str(BASE)], check=True, capture_output=True, text=True
    )
    documents = [one for one in yaml.safe_load_all(built.stdout) if one]
    return {f"{one['kind']} {one['metadata']['name']}": one for one in documents}


@pytest.fixture
def pod(rendered: dict[str, dict[str, Any]]) -> Any:
    return rendered["Deployment vllm"]["spec"]["template"]["spec"]


@pytest.fixture
def options(rendered: dict[str, dict[str, Any]]) -> Any:
    (config,) = (one for name, one in rendered.items() if name.startswith("ConfigMap kvtier-"))
    return json.loads(config["data"]["kv.json"])["kv_connector_extra_config"]


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_kubernetes_schemas_are_satisfied(
    rendered: dict[str, dict[str, Any]], version: str
) -> None:
    assert len(rendered) == 4
    for document in rendered.values():
        kubernetes_validate.validate(document, version, strict=True)
    wrong = json.loads(json.dumps(rendered["Deployment vllm"]))
    wrong["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


def test_mounts_ports_and_labels_lead_somewhere(
    rendered: dict[str, dict[str, Any]], pod: Any
) -> None:
    volumes = {one["name"] for one in pod["volumes"]}
    mounted = {one["name"] for part in walk(pod) for one in part.get("volumeMounts", ())}
    assert mounted == volumes
    (engine,) = pod["containers"]
    ports = {one["name"]: one["containerPort"] for one in engine["ports"]}
    for part in walk(engine):
        assert part.get("httpGet", {"port": "http"})["port"] in ports
    labels = rendered["Deployment vllm"]["spec"]["template"]["metadata"]["labels"]
    for service in ("Service vllm", "Service kvtier-metrics"):
        spec = rendered[service]["spec"]
        assert spec["selector"].items() <= labels.items()
        assert {one["targetPort"] for one in spec["ports"]} <= set(ports)
    annotations = rendered["Service kvtier-metrics"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["kvtier-metrics"])


def test_the_configuration_fits_the_pod(pod: Any, options: Any) -> None:
    (engine,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    at = {one["mountPath"]: volumes[one["name"]] for one in engine["volumeMounts"]}
    room = bytes_of(at["/dev/shm"]["emptyDir"]["sizeLimit"])
    assert bytes_of(options["cpu_bytes_to_use"]) < room
    assert room < bytes_of(engine["resources"]["limits"]["memory"])
    (metrics,) = (one for one in engine["ports"] if one["name"] == "kvtier-metrics")
    assert (options["metrics_port"], options["metrics_host"]) == (
        metrics["containerPort"],
        "0.0.0.0",
    )
    files, redis = options["secondary_tiers"]
    assert re.match(r"file://(/data/kv)\?", files)[1] in at  # type: ignore[index]
    assert options["admin_socket"] in at
    for secret in (redis["password_file"], redis["codec"].partition(":")[2]):
        assert str(Path(secret).parents[1]) in at
    assert engine["image"] == image()
    assert pod["initContainers"][0]["image"] == engine["image"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes the pod's user")
def test_the_engines_user_can_use_its_secrets(pod: Any, tmp_path: Path) -> None:
    """A mounted secret is a set of links to root's files. ``fsGroup`` lets the group read them."""
    security = pod["securityContext"]
    assert {security[name] for name in ("runAsUser", "runAsGroup", "fsGroup")} == {USER}
    data = tmp_path / "secrets" / "..data"
    data.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    for name, content in (("chunk.keys", "22" * 32), ("redis-password", "hunter2")):
        (data / name).write_text(content + "\n")
        (data / name).chmod(0o440)
        os.chown(data / name, 0, USER)
        (tmp_path / "secrets" / name).symlink_to(f"..data/{name}")
    for place in (*tmp_path.parents, tmp_path):
        if place.owner() == "root" and place != Path("/"):
            place.chmod(place.stat().st_mode | 0o011)
    os.chown(tmp_path / "run", 0, USER)
    (tmp_path / "run").chmod(0o2770)
    (first,) = pod["initContainers"]
    command = [
        word.replace("/run/secrets/kvtier", f"{tmp_path}/secrets").replace(
            "/run/kvtier", f"{tmp_path}/run"
        )
        for word in (*first["command"], *first["args"])
    ]
    subprocess.run(command, check=True, user=USER, group=USER, extra_groups=[])
    copies = sorted((tmp_path / "run/secrets").iterdir())
    assert [path.name for path in copies] == ["chunk.keys", "redis-password"]
    for copy in copies:
        status = copy.stat()
        assert (status.st_uid, status.st_mode & 0o777) == (USER, 0o400)


def test_kvtier_accepts_the_configuration(options: Any, tmp_path: Path) -> None:
    for name, content in (("chunk.keys", "22" * 32), ("redis-password", "hunter2")):
        (tmp_path / name).write_text(content + "\n")
        (tmp_path / name).chmod(0o400)
    text = (BASE / "kv.json").read_text().replace("/run/kvtier/secrets", str(tmp_path))
    (tmp_path / "kv.json").write_text(text)
    done = kvtier("check", "--no-dry-run", tmp_path / "kv.json")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "kv.json").write_text(text.replace("metrics_port", "metrics_prt"))
    assert kvtier("check", "--no-dry-run", tmp_path / "kv.json").returncode == 2


def test_the_service_of_kserve_gives_vllm_its_configuration(tmp_path: Path) -> None:
    """Only the Kubernetes and vLLM parts are checked, because no package has KServe's schema."""
    config, service = yaml.safe_load_all(KSERVE.read_text())
    pod = service["spec"]["template"]
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "engine"}, "spec": pod}
    for document in (config, body):
        kubernetes_validate.validate(document, "1.34", strict=True)
    (engine,) = pod["containers"]
    assert engine["image"] == image()
    mounts = {one["name"]: one["mountPath"] for one in engine["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes.keys() - mounts.keys() == {"dshm"}
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    ((name, text),) = config["data"].items()
    options = json.loads(text)["kv_connector_extra_config"]
    assert options["secondary_tiers"][0].startswith(f"file://{mounts['kv']}?")
    room = bytes_of(volumes["dshm"]["emptyDir"]["sizeLimit"])
    assert bytes_of(options["cpu_bytes_to_use"]) < room
    assert room < bytes_of(engine["resources"]["limits"]["memory"])
    # Evaluate the options in a shell, as KServe's command does.
    (tmp_path / name).write_text(text)
    variables = {one["name"]: one["value"] for one in engine["env"]}
    added = variables["VLLM_ADDITIONAL_ARGS"].replace(mounts["config"], str(tmp_path))
    script = r"""eval "printf '%s\\0' ${VLLM_ADDITIONAL_ARGS}" """
    given = subprocess.run(
        ["bash", "-c", script], env={"VLLM_ADDITIONAL_ARGS": added}, check=True, capture_output=True
    )
    assert given.stdout.decode().split("\0") == ["--kv-transfer-config", text.rstrip(), ""]
    done = kvtier("check", "--no-dry-run", tmp_path / name)
    assert done.returncode == 0, done.stdout + done.stderr
