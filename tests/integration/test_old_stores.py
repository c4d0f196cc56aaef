from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from support.command import tier
from support.filled import contents
from support.old_store import CHUNK_BYTES, KEYS, NAMESPACE, STORES, OldStore

ARCHIVES = sorted((Path(__file__).parent / "stores").glob("*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="tar")
    return tmp_path


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_every_chunk_is_read(old: Path, store: OldStore, direct_io: str) -> None:
    url = store.url(old, f"&direct_io={direct_io}")
    expected = [store.content(key, CHUNK_BYTES) for key in KEYS]
    assert contents(url, NAMESPACE, KEYS, CHUNK_BYTES) == expected


@pytest.mark.parametrize("store", STORES, ids=lambda store: store.name)
def test_an_operator_sees_what_it_holds(old: Path, store: OldStore) -> None:
    url = store.url(old)
    (listed,) = tier("ls", url)["tiers"][0]["namespaces"]
    assert (listed["chunks"], listed["facts"]["model"]) == (len(KEYS), NAMESPACE.facts["model"])
    (found,) = tier("verify", url)["namespaces"]
    compressed = len(KEYS) if "compress" in store.options else 0
    assert (found["whole"], found["damaged"], found["compressed"]) == (len(KEYS), [], compressed)


def test_a_version_has_left_a_store() -> None:
    assert ARCHIVES
