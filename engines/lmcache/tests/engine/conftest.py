"""Stores, and a second process with LMCache in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmcache_host import KIND, OBJECT_BYTES, Kind, stored_elsewhere
from support.engine_stores import STORES, another_process, running
from support.stores import Store

StoreElsewhere = Callable[..., int]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Each store, running and empty."""
    with running(request.param, tmp_path / "store", OBJECT_BYTES) as made:
        yield made


@pytest.fixture(scope="session")
def store_elsewhere() -> Iterator[StoreElsewhere]:
    """Store a prompt's chunks in another process, which has a storage manager of its own."""
    with another_process() as process:

        def run(url: str, chunks: Sequence[int], kind: Kind = KIND, **options: Any) -> int:
            return process.submit(stored_elsewhere, url, chunks, kind, **options).result()

        yield run
