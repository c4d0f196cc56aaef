"""``kvtier check`` tells a mistake in one message; ``test_messages`` has more of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import kvtier_json
from support.small_shm import run_with_shm

INSTALLED = "broken, clumsy, file, memory, mooncake, newer, obstore, redis, s3, stranger, talkative"


@pytest.mark.parametrize(
    ("tiers", "expected"),
    [
        (
            '"file://{tmp}/kv", "file://{tmp}/kv/cold?name=cold"',
            "option 'tiers[1]': 'cold' keeps its chunks in file://{tmp}/kv/cold, inside "
            "file://{tmp}/kv, where 'file' (tiers[0]) keeps its own: give each a place of its own",
        ),
        (
            '{type = "nfs"}',
            "option 'tiers[0].type': no backend 'nfs'; install the package that provides it; "
            f"installed: {INSTALLED}",
        ),
    ],
    ids=["a root inside another tier's", "a backend that is not installed"],
)
def test_a_mistake_is_told_in_one_message(
    tiers: str, expected: str, tmp_path: Path, faulty_site: Path
) -> None:
    path = tmp_path / "kv.toml"
    path.write_text(f"slots = 4\ntiers = [{tiers.replace('{tmp}', str(tmp_path))}]\n")
    found = kvtier_json("check", path, status=2, PYTHONPATH=str(faulty_site))
    assert found["mistakes"] == [f"{path}: {expected.replace('{tmp}', str(tmp_path))}"]


def test_a_pool_larger_than_shared_memory_is_told(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(
        json.dumps(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KVTierOffloadingSpec",
                    "spec_module_path": "kvtier_vllm",
                    "cpu_bytes_to_use": "64MiB",
                    "secondary_tiers": ["memory:"],
                },
            }
        )
    )
    run_with_shm(
        16 << 20,
        f"""
        import contextlib, io, json, pathlib, sys
        from kvtier_sdk.cli import main
        sys.argv = ["kvtier", "check", "--json", {str(tmp_path / "kv.json")!r}]
        with open({str(tmp_path / "out")!r}, "w") as out, contextlib.redirect_stdout(out):
            with contextlib.suppress(SystemExit):
                main()
        """,
    )
    findings = json.loads((tmp_path / "out").read_text())
    assert not findings["ok"]
    assert findings["pool_fault"] == (
        "the host pool needs 64 MiB, and 16 MiB are free in /dev/shm: make the pool smaller, or "
        "make /dev/shm larger (docker run --shm-size, in Kubernetes an emptyDir of medium Memory)"
    )
