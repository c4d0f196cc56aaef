from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.author import ROOT, build_wheel
from support.live import CHUNK_BYTES
from support.runners import RUNNERS
from support.stores import Folder, RedisStore, S3Store, Store

#: A tier's ``open`` method, which logs a password and raises an error that quotes it.
CLUMSY = """
    async def open(self):
        self.context.logger.warning("mind //ada:hunter2@host")
        raise LookupError("no //ada:hunter2@host")
"""

#: The smallest tier that the SDK can load.
TIER = """
from kvtier_sdk import ChunkTierManager

class Tier(ChunkTierManager):
    contract_version = {version}
    async def contains_chunk(self, key): return False
    async def store_chunk(self, transfer): pass
    async def load_chunk(self, transfer): pass
"""

Install = Callable[..., Path]


@pytest.fixture(params=RUNNERS)
def runner(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(params=[Folder, RedisStore, S3Store], ids=lambda kind: kind.name)
def empty_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = request.param(tmp_path / "store", CHUNK_BYTES)
    yield made
    made.kill()


@pytest.fixture(scope="session")
def install_package(tmp_path_factory: pytest.TempPathFactory) -> Install:
    """Return a function that writes a package as pip would install it."""

    def install(
        distribution: str, version: str, modules: dict[str, str], entry_points: dict[str, str]
    ) -> Path:
        site = tmp_path_factory.mktemp(distribution)
        package = site / distribution.replace("-", "_")
        metadata = site / f"{package.name}-{version}.dist-info"
        for directory in (package, metadata):
            directory.mkdir()
        for module, text in {"__init__": "", **modules}.items():
            (package / f"{module}.py").write_text(text)
        (metadata / "METADATA").write_text(f"Name: {distribution}\nVersion: {version}\n")
        points = [f"{name} = {package.name}.{target}" for name, target in entry_points.items()]
        (metadata / "entry_points.txt").write_text("\n".join(["[kvtier.backends]", *points]))
        return site

    return install


@pytest.fixture(scope="session")
def faulty_site(install_package: Install) -> Path:
    return install_package(
        "kvtier-faulty",
        "0.0.7",
        {
            "broken": "raise RuntimeError('no such driver')",
            "stranger": "class Tier: contract_version = 1",
            "newer": TIER.format(version=2),
            "clumsy": TIER.format(version=1) + CLUMSY,
        },
        {name: f"{name}:Tier" for name in ("broken", "stranger", "newer", "clumsy")},
    )


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheels")
    for package in (ROOT, ROOT / "engines/vllm"):
        build_wheel(package, directory)
    return directory
