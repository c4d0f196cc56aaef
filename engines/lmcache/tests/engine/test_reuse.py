import threading
from pathlib import Path

import pytest
from lmcache_host import KIND, OBJECT_BYTES, Found, Kind, hosted
from support.stores import Store

from .conftest import StoreElsewhere

PROMPT = range(12)
FIRST_HALF, SECOND_HALF = PROMPT[:6], PROMPT[6:]


def test_another_process_finds_stored_chunks(store: Store, store_elsewhere: StoreElsewhere) -> None:
    assert store_elsewhere(store.url, PROMPT) == len(PROMPT)
    assert store.chunks() == len(PROMPT)
    with hosted(store.url) as host:
        assert host.load(PROMPT) == Found(hits=12, equal=12)
        assert host.count("found_chunks") == host.count("loaded_chunks") == len(PROMPT)
        assert host.count("hit_chunks") == len(PROMPT)
        assert host.count("loaded_bytes") == len(PROMPT) * OBJECT_BYTES
        # The prefix ends at the first chunk that no tier has.
        assert host.load(range(8, 20)) == Found(hits=4, equal=4)


def test_a_damaged_chunk_is_a_miss(store: Store) -> None:
    with hosted(store.url) as host:
        host.store(PROMPT)
        store.damage()
        host.forget()
        assert host.load(PROMPT) == Found(hits=0, equal=0)
        assert host.reasons("failures")["load.corrupt"] == len(PROMPT)
        # The recomputed chunks replace the damaged chunks.
        host.store(PROMPT)
        host.forget()
        assert host.load(PROMPT) == Found(hits=12, equal=12)


def test_no_request_fails_when_the_server_is_killed(store: Store) -> None:
    with hosted(store.url, load_deadline="2s", store_deadline="2s") as host:
        host.store(FIRST_HALF)
        host.forget()
        assert host.load(FIRST_HALF) == Found(hits=6, equal=6)
        host.forget()
        killer = threading.Timer(0.05, store.kill)
        killer.start()
        while killer.is_alive():
            found = host.load(FIRST_HALF)
            assert found.hits == found.equal
            host.forget()
        # The store is still down. Every request must be answered, and no object may stay locked.
        host.store(SECOND_HALF)
        host.forget()
        assert host.load(PROMPT) == Found(hits=0, equal=0)
        status = host.manager.report_status()
        assert status["is_healthy"]
        assert host.manager.memcheck()
        assert host.manager.get_l1_usage()[0] == 0


def keep_apart(url: str, other: Kind) -> None:
    with hosted(url) as host:
        host.store(PROMPT)
        host.forget()
        assert host.load(PROMPT, other) == Found(hits=0, equal=0)
        host.store(PROMPT, other)
        for kind in (KIND, other):
            host.forget()
            assert host.load(PROMPT, kind) == Found(hits=12, equal=12)


def test_two_models_on_one_store_never_meet(store: Store) -> None:
    keep_apart(store.url, Kind(model="org/model-b"))


@pytest.mark.parametrize(
    "other",
    [Kind(dtype="float16"), Kind(dtype="float32"), Kind(world_size=2), Kind(salt="tenant")],
    ids=["dtype", "length", "parallelism", "tenant"],
)
def test_what_else_decides_about_reuse_keeps_objects_apart(other: Kind, tmp_path: Path) -> None:
    keep_apart(f"file://{tmp_path}/kv?direct_io=off", other)
