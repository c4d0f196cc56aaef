"""Stores, and a second process, for the tests of an engine's own storage interface."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.memcached_store import MemcachedStore
from support.stores import Folder, RedisStore, S3Store, ServedStore, Store

STORES: dict[str, type[Store]] = {
    kind.name: kind for kind in (Folder, RedisStore, S3Store, MemcachedStore)
}


@contextmanager
def running(name: str, folder: Path, chunk_bytes: int) -> Iterator[Store]:
    """Start one of :data:`STORES`, empty, and end it after the block."""
    store = STORES[name](folder, chunk_bytes)  # type: ignore[call-arg]
    try:
        yield store
    finally:
        if isinstance(store, ServedStore):
            store.kill()


@contextmanager
def another_process() -> Iterator[ProcessPoolExecutor]:
    """Start a process that shares nothing with this one but the stores."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process
