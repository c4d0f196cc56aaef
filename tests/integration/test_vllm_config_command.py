from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import kvtier

from kvtier_vllm.transfer_config import read_transfer_config


@pytest.mark.parametrize("manager", ["kvtier", "vllm"])
def test_the_configuration_has_what_was_given(manager: str, tmp_path: Path) -> None:
    urls = [f"file://{tmp_path}/kv?capacity=1MiB", "memory:?capacity=2MiB"]
    done = kvtier("vllm-config", *urls, "--pool", "1MiB", "--manager", manager)
    assert done.returncode == 0, done.stderr
    config = read_transfer_config(json.loads(done.stdout), where="test")
    assert config.pool_bytes == 2**20
    assert [tier.backend for tier in config.tiers] == ["file", "memory"]
    (tmp_path / "kv.json").write_text(done.stdout)
    checked = kvtier("check", "--timeout", "120s", str(tmp_path / "kv.json"))
    assert checked.returncode == 0, checked.stdout


def test_the_revision_reaches_both_managers() -> None:
    for manager in ("kvtier", "vllm"):
        options = ("--pool", "1MiB", "--manager", manager, "--model-revision", "of today")
        assert "of today" in kvtier("vllm-config", "memory:?capacity=1MiB", *options).stdout


@pytest.mark.parametrize(
    ("options", "services"),
    [
        ((), {"admin_socket": "auto", "metrics_port": 9400}),
        (("--admin-socket", "off", "--metrics-port", "0"), {}),
        (
            ("--admin-socket", "/run/e", "--metrics-port", "9401"),
            {"admin_socket": "/run/e", "metrics_port": 9401},
        ),
        (("--manager", "vllm"), {}),
    ],
)
def test_an_operators_services_are_on_unless_told_otherwise(
    options: tuple[str, ...], services: dict[str, object]
) -> None:
    done = kvtier("vllm-config", "memory:?capacity=1MiB", "--pool", "1MiB", *options)
    extra = json.loads(done.stdout)["kv_connector_extra_config"]
    assert {name: extra[name] for name in extra.keys() & {"admin_socket", "metrics_port"}} == (
        services
    )


@pytest.mark.parametrize(
    ("url", "pool", "says"),
    [
        ("file:///kv?capcity=1GiB", "1GiB", "did you mean 'capacity'?"),
        ("memory:?capacity=1MiB", "1GX", "unit 'GX'"),
        ("redis://user:hunter2@host", "1GiB", "redis://user:***@host has a secret in it"),
    ],
)
def test_mistakes_are_said(url: str, pool: str, says: str) -> None:
    for manager in ("kvtier", "vllm"):
        done = kvtier("vllm-config", url, "--pool", pool, "--manager", manager)
        assert done.returncode == 2
        assert says in done.stderr
        assert "hunter2" not in done.stderr
        assert not done.stdout
