from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.author import ROOT, environment_of, run, stranger

pytestmark = pytest.mark.reader

EXAMPLE = ROOT / "examples" / "kvtier-sqlite"
MEMCACHED = ROOT / "examples" / "kvtier-memcached"


@pytest.fixture(scope="session")
def kvtier(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    directory = tmp_path_factory.mktemp("sqlite")
    python = environment_of(EXAMPLE, wheels, directory)
    return lambda *words: run([python, "-P", "-m", *words], directory, stranger(wheels))


def test_it_is_under_80_lines() -> None:
    (module,) = EXAMPLE.glob("kvtier_sqlite/*.py")
    assert len(module.read_text().splitlines()) < 80


def test_it_keeps_the_contract(kvtier: Callable[..., str]) -> None:
    printed = kvtier("pytest")
    assert " passed" in printed
    assert "failed" not in printed


def test_two_processes_share_what_is_in_the_file(
    kvtier: Callable[..., str], tmp_path: Path
) -> None:
    def replay() -> float:
        url = f"sqlite:?path={tmp_path}/kv.db"
        words = ["--json", "--requests", "40", "--slots", "40", "--tier", url]
        report = json.loads(kvtier("kvtier_sdk.cli", "replay", *words))
        assert report["wrong_bytes"] == 0
        return float(report["hit_rate"])

    assert replay() < 1
    assert replay() == 1


def test_it_is_listed_and_can_be_tried_out(kvtier: Callable[..., str], tmp_path: Path) -> None:
    assert "sqlite  kvtier-sqlite 0.1.0\n" in kvtier("kvtier_sdk.cli", "backends", "sqlite")
    config = tmp_path / "kv.toml"
    config.write_text(f'slots = 4\ntiers = ["sqlite:?path={tmp_path}/kv.db"]\n')
    assert "tier 'sqlite': ok (" in kvtier("kvtier_sdk.cli", "check", str(config))


def test_the_memcached_tier_is_under_150_lines() -> None:
    tier = MEMCACHED / "kvtier_memcached" / "__init__.py"
    assert len(tier.read_text().splitlines()) < 150


def test_the_memcached_tier_keeps_the_contract(wheels: Path, tmp_path: Path) -> None:
    python = environment_of(MEMCACHED, wheels, tmp_path)
    printed = run([python, "-P", "-m", "pytest"], tmp_path, stranger(wheels))
    assert " passed" in printed
    assert "failed" not in printed
    assert "no hook" not in printed
