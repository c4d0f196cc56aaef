"""The memcached example stays small, and runs from its wheel."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import stores
from support.author import ROOT, environment_of, run, stranger

pytestmark = pytest.mark.reader

EXAMPLE = ROOT / "examples" / "kvtier-memcached"


@pytest.fixture(scope="session")
def environment(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("memcached")
    environment_of(EXAMPLE, wheels, directory)
    return directory


@pytest.fixture
def make_server() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make() -> Any:
        made.append(stores.make_server("-m", "256"))
        return made[-1].start()

    yield make
    for server in made:
        server.kill()


def command(environment: Path, *words: str) -> list[str]:
    return [str(environment / "env" / "bin" / "python"), "-P", "-m", *words]


def replay(environment: Path, *words: str) -> list[str]:
    # A chunk is stored in several pieces, and the pool is so small that the tier must serve hits.
    sizes = ["--slots", "40", "--chunk-bytes", "256KiB"]
    return command(environment, "kvtier_sdk.cli", "replay", "--json", *sizes, *words)


def test_the_tier_is_under_150_lines() -> None:
    tier = EXAMPLE / "kvtier_memcached" / "__init__.py"
    assert len(tier.read_text().splitlines()) < 150


def test_it_keeps_the_contract(environment: Path, wheels: Path) -> None:
    printed = run(command(environment, "pytest"), environment, stranger(wheels))
    assert " passed" in printed
    assert "failed" not in printed
    assert "no hook" not in printed


def test_two_processes_share_what_is_in_two_servers(
    environment: Path, wheels: Path, make_server: Callable[..., Any]
) -> None:
    servers = [make_server(), make_server()]
    places = ",".join(f"127.0.0.1:{server.port}" for server in servers)
    url = f"memcached:?servers={places}&piece=100KiB"

    def hit_rate() -> float:
        words = replay(environment, "--requests", "30", "--tier", url)
        report = json.loads(run(words, environment, stranger(wheels)))
        assert report["wrong_bytes"] == 0
        return float(report["hit_rate"])

    assert hit_rate() < 1
    assert hit_rate() == 1
    assert all(server.names() for server in servers)
