from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier, kvtier_json

from kvtier_sdk import TieringConfig

KV = """
slots = 8
chunk_bytes = "8KiB"

[namespace]
api_token = "hunter2"

[[tiers]]
type = "file"
root = "{root}"
capacity = "1MiB"

[[tiers]]
url = "redis://user:hunter2@127.0.0.1:1"
"""
HOST: dict[str, Any] = {
    "spec_name": "KVTierOffloadingSpec",
    "spec_module_path": "kvtier_vllm",
    "cpu_bytes_to_use": "1MiB",
    "secondary_tiers": ["memory:?capacity=1MiB"],
}
GUEST: dict[str, Any] = {
    "spec_name": "TieringOffloadingSpec",
    "cpu_bytes_to_use": 1 << 20,
    "secondary_tiers": [
        {"type": "fs", "root_dir": "/kv"},
        {"type": "kvtier", "url": "memory:?capacity=1MiB", "model_revision": "v2"},
    ],
}
BY_CLASS = {"type": "KVTierSecondaryTier", "backend": "memory"}


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    # The machine can be busy. A --timeout in the arguments overrides this one.
    return kvtier("check", "--timeout", "120s", *arguments)


def findings(*arguments: str, status: int = 0) -> dict[str, Any]:
    return kvtier_json("check", "--timeout", "120s", *arguments, status=status)


def write(path: Path, extra: dict[str, Any], **further: Any) -> str:
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **further}
    path.write_text(json.dumps(config | {"kv_connector_extra_config": extra}))
    return str(path)


@pytest.fixture
def kv(tmp_path: Path) -> str:
    path = tmp_path / "kv.toml"
    path.write_text(KV.format(root=tmp_path / "kv"))
    return str(path)


def test_what_is_in_effect_is_shown_without_secrets(kv: str, tmp_path: Path) -> None:
    found = findings("--no-dry-run", kv)
    assert (found["ok"], found["mistakes"], found["tiers"]) == (True, [], [])
    effective = found["configuration"]
    assert effective["policy"] == "returns"
    assert effective["namespace"] == {"api_token": "***"}
    file, redis = effective["tiers"]
    assert (file["capacity"], file["min_free"], file["load_deadline"]) == (1 << 20, 0.05, 5.0)
    assert (redis["username"], redis["password"], redis["sentinel_password"]) == (
        "user",
        "***",
        None,
    )
    assert "hunter2" not in json.dumps(found)
    assert not (tmp_path / "kv").exists(), "nothing is touched"


def test_the_text_is_toml_that_says_the_same(kv: str) -> None:
    done = check("--no-dry-run", kv)
    assert (done.returncode, done.stderr) == (0, "")
    text, _, last = done.stdout.rstrip().rpartition("\n")
    assert last == f"{kv}: ok"
    shown = tomllib.loads(text)
    expected = findings("--no-dry-run", kv)["configuration"]
    assert shown == _without_nothing(expected)
    assert TieringConfig.from_dict(shown).slots == 8


def test_a_tier_that_works_is_told_from_one_that_does_not(kv: str, tmp_path: Path) -> None:
    file, redis = findings(kv, status=1)["tiers"]
    assert (file["name"], file["fault"]) == ("file", None)
    assert set(file["steps_s"]) == {"open", "store", "lookup", "load", "remove"}
    assert "Connection refused" in redis["fault"]
    assert list((tmp_path / "kv").rglob("*.kv")) == []
    done = check(kv)
    assert done.returncode == 1
    assert "\ntier 'file': ok (open " in done.stdout
    assert "\ntier 'redis': FAILED\n  redis open: no connection to" in done.stdout
    assert "\n  what to do: see that the store runs" in done.stdout
    assert done.stdout.endswith("does not work as it is\n")
    assert "hunter2" not in done.stdout


def test_a_wrong_file_is_told_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "kv.toml"
    path.write_text('slots = "many"\ntiers = ["nfs:"]\n')
    done = check(str(path))
    assert done.returncode == 2
    mistakes = done.stdout.splitlines()
    assert [line.startswith(f"{path}: option '") for line in mistakes] == [True, True, False]
    assert mistakes[-1] == f"{path}: is wrong"
    assert findings(str(path), status=2)["mistakes"] == mistakes[:-1]


@pytest.mark.parametrize("extra", [HOST, GUEST], ids=["our manager", "vLLM's manager"])
def test_what_vllm_is_given_is_read(tmp_path: Path, extra: dict[str, Any]) -> None:
    found = findings("--chunk-bytes", "16KiB", write(tmp_path / "kv.json", extra))
    assert found["configuration"]["pool_bytes"] == 1 << 20
    (tier,) = found["configuration"]["tiers"]
    assert (tier["type"], tier["capacity"]) == ("memory", 1 << 20)
    assert [trial["fault"] for trial in found["tiers"]] == [None]
    assert found["remarks"] == []


@pytest.mark.parametrize(
    ("extra", "further", "said"),
    [
        (HOST, {"kv_connector": "NixlConnector"}, "option 'kv_connector' is 'NixlConnector'; "),
        ({**GUEST, "secondary_tiers": [{"type": "fs"}]}, {}, "kvtier is not used"),
        ({**GUEST, "secondary_tiers": "memory:"}, {}, "'secondary_tiers' should be a list"),
        ({**GUEST, "cpu_bytes_to_use": None}, {}, "'cpu_bytes_to_use' is missing"),
        (HOST, {"kv_role": None}, "option 'kv_role' is missing; allowed: kv_producer, kv_"),
        (HOST, {"kv_role": "both"}, "option 'kv_role' is 'both' but should be 'kv_producer', "),
        (HOST, {"kv_rol": "kv_both"}, "unknown option 'kv_rol'; did you mean 'kv_role'?"),
        (
            {**HOST, "spec_module_path": "kvtier_sdk.vllm"},
            {},
            "is 'kvtier_sdk.vllm', where there is no KVTierOffloadingSpec; write ",
        ),
        (
            {**GUEST, "secondary_tiers": [{"type": "fs"}, BY_CLASS]},
            {},
            "option 'secondary_tiers[1].module_path' is missing; write ",
        ),
    ],
)
def test_a_mistake_in_what_vllm_is_given_is_told(
    tmp_path: Path, extra: dict[str, Any], further: dict[str, Any], said: str
) -> None:
    path = write(tmp_path / "kv.json", extra, **further)
    (mistake,) = findings(path, status=2)["mistakes"]
    assert mistake.startswith(f"{path}: ")
    assert said in mistake


def test_a_pool_that_no_chunk_fits_is_told_beside_its_tiers(tmp_path: Path) -> None:
    path = write(tmp_path / "kv.json", HOST)
    found = findings("--chunk-bytes", "2MiB", path, status=1)
    assert found["pool_fault"] == (
        "option 'cpu_bytes_to_use' is 1 MiB, less than one slot of 2 MiB; raise it to at least that"
    )
    assert len(found["tiers"]) == 1


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(of) for key, of in value.items() if of is not None}
    return [_without_nothing(of) for of in value] if isinstance(value, list) else value


def test_a_url_is_tried_without_a_configuration(tmp_path: Path) -> None:
    done = check(f"file://{tmp_path}/kv?capacity=1MiB")
    assert (done.returncode, done.stderr) == (0, "")
    (tier,) = tomllib.loads(done.stdout.partition("\ntier 'file': ok")[0])["tiers"]
    assert tier["capacity"] == 1 << 20
    assert "slots" not in done.stdout
    assert "pool" not in done.stdout


def test_a_urls_password_is_not_shown() -> None:
    done = check("--no-dry-run", "redis://user:hunter2@127.0.0.1:1")
    assert done.stdout.endswith("redis://user:***@127.0.0.1:1: ok\n")
    assert "hunter2" not in done.stdout + done.stderr
