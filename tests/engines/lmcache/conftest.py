"""Stores, and a second process with LMCache in it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from support.lmcache_host import KIND, OBJECT_BYTES, Kind, stored_elsewhere
from support.memcached_store import MemcachedStore
from support.stores import Folder, RedisStore, S3Store, ServedStore, Store

STORES: dict[str, type[Store]] = {
    kind.name: kind for kind in (Folder, RedisStore, S3Store, MemcachedStore)
}

StoreElsewhere = Callable[..., int]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Each store, running and empty."""
    made = STORES[request.param](tmp_path / "store", OBJECT_BYTES)  # type: ignore[call-arg]
    yield made
    if isinstance(made, ServedStore):
        made.kill()


@pytest.fixture(scope="session")
def store_elsewhere() -> Iterator[StoreElsewhere]:
    """Store a prompt's chunks in another process, which has a storage manager of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as other:

        def run(url: str, chunks: Sequence[int], kind: Kind = KIND) -> int:
            return other.submit(stored_elsewhere, url, chunks, kind).result()

        yield run
