from collections.abc import Callable, Iterator, Sequence

import pytest
from support.sglang_host import KIND, PART_BYTES, Kind, stored_elsewhere
from support.stores import another_process, store_fixture

StoreElsewhere = Callable[..., int]


store = store_fixture(PART_BYTES)


@pytest.fixture(scope="session")
def store_elsewhere() -> Iterator[StoreElsewhere]:
    with another_process() as process:

        def run(pages: Sequence[int], kind: Kind = KIND, **tier: object) -> int:
            return process.submit(stored_elsewhere, pages, kind, tier).result()

        yield run
