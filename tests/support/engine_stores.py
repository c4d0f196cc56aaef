"""Stores, and a second process, for the tests of an engine's own storage interface."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.memcached_store import MemcachedStore
from support.stores import Folder, RedisStore, S3Store, ServedStore, Store

STORES: dict[str, type[Store]] = {
    kind.name: kind for kind in (Folder, RedisStore, S3Store, MemcachedStore)
}


def store_fixture(chunk_bytes: int) -> Any:
    @pytest.fixture(params=STORES, name="store")
    def each_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        made = STORES[request.param](tmp_path / "store", chunk_bytes)  # type: ignore[call-arg]
        yield made
        if isinstance(made, ServedStore):
            made.kill()

    return each_store


@contextmanager
def another_process() -> Iterator[ProcessPoolExecutor]:
    """Start a process that shares nothing with this one but the stores."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process
