from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from lmcache_host import KIND, OBJECT_BYTES, Kind, stored_elsewhere
from support.stores import another_process, store_fixture

StoreElsewhere = Callable[..., int]


store = store_fixture(OBJECT_BYTES)


@pytest.fixture(scope="session")
def store_elsewhere() -> Iterator[StoreElsewhere]:
    with another_process() as process:

        def run(url: str, chunks: Sequence[int], kind: Kind = KIND, **options: Any) -> int:
            return process.submit(stored_elsewhere, url, chunks, kind, **options).result()

        yield run
