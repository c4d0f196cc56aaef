"""Stores, and a second process with SGLang in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.engine_stores import STORES, another_process, running
from support.sglang_host import KIND, PART_BYTES, Kind, stored_elsewhere
from support.stores import Store

StoreElsewhere = Callable[..., int]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """Each store, running and empty."""
    with running(request.param, tmp_path / "store", PART_BYTES) as made:
        yield made


@pytest.fixture(scope="session")
def store_elsewhere() -> Iterator[StoreElsewhere]:
    """Store pages in another process, which has a cache controller of its own."""
    with another_process() as process:

        def run(pages: Sequence[int], kind: Kind = KIND, **tier: object) -> int:
            return process.submit(stored_elsewhere, pages, kind, tier).result()

        yield run
