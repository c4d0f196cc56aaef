"""A maintenance tool reads the chunks of a tier that engines use, without changing the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.filled import CHUNK_BYTES, fill, keys_from
from support.stores import Folder, Store

from kvtier_sdk import Namespace, StoredNamespace, TierSpec
from kvtier_sdk.cli.tier.maintenance import open_for_maintenance

OURS = Namespace({"model": "llama", "hash_seed": "00"})
THEIRS = Namespace({"model": "llama", "hash_seed": "ff"})
KEYS = keys_from(0, 20)


@pytest.fixture
def store(empty_store: Store) -> Store:
    fill(empty_store.url, OURS, KEYS)
    fill(empty_store.url, THEIRS, KEYS[:5])
    return empty_store


def namespaces(store: Store) -> dict[object, StoredNamespace]:
    spec = TierSpec.from_url(store.url)
    with open_for_maintenance(spec, Namespace({"model": "of no engine"})) as tier:
        return {found.facts.get("hash_seed"): found for found in tier.namespaces()}


def test_a_limit_evicts_nothing(store: Store) -> None:
    if store.name == "redis":
        pytest.skip("its server keeps the limit")
    spec = TierSpec.from_url(f"{store.url}&capacity={2 * CHUNK_BYTES}")
    with open_for_maintenance(spec, namespaces(store)["00"]) as tier:
        assert len(list(tier.entries())) == 20
        tier.examine(KEYS)
    assert store.chunks() == 25


def test_chunks_whose_manifest_is_gone_can_be_listed_and_deleted(tmp_path: Path) -> None:
    store = Folder(tmp_path / "store", CHUNK_BYTES)
    fill(store.url, OURS, KEYS)
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.unlink()
    (found,) = namespaces(store).values()
    assert (found, found.facts) == (OURS.for_chunks(CHUNK_BYTES), {})
    with open_for_maintenance(TierSpec.from_url(store.url), found) as tier:
        tier.delete([entry.key for entry in tier.entries()])
    assert store.chunks() == 0
