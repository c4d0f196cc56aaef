from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from support.mooncake_store import MooncakeStore


@pytest.fixture(scope="session")
def client() -> None:
    if find_spec("mooncake") is None:
        pytest.skip("there is no wheel of the Mooncake client for this Python")


@pytest.fixture(scope="session")
def store(client: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeStore]:
    store = MooncakeStore(tmp_path_factory.mktemp("store")).start()
    yield store
    store.kill()
