import threading
from pathlib import Path

import pytest
from support.sglang_host import KIND, PART_BYTES, Kind, hosted
from support.stores import Store

from .conftest import StoreElsewhere

PROMPT = range(12)
PARTS = 2 * len(PROMPT)

#: How SGLang stores pages, and how many chunks a page has.
WAYS = {
    "in place": (KIND, 2),
    "in place, direct": (Kind(layout="page_first_direct"), 2),
    "in place, heads first": (Kind(layout="page_head"), 2),
    "in place, latent": (Kind(is_mla=True), 1),
    "staged, layers first": (Kind(layout="layer_first"), 1),
    "staged, latent": (Kind(layout="layer_first", is_mla=True), 1),
    "copied by SGLang": (Kind(zero_copy=False), 1),
}


def test_another_process_finds_stored_chunks(store: Store, store_elsewhere: StoreElsewhere) -> None:
    assert store_elsewhere(PROMPT, url=store.url) == len(PROMPT)
    assert store.chunks() == PARTS
    with hosted(url=store.url) as host:
        # The prefix ends at the first page that no tier has.
        assert host.load(range(16)) == len(PROMPT)
        assert host.count("loaded_chunks") == host.count("hit_chunks") == PARTS
        assert host.count("loaded_bytes") == PARTS * PART_BYTES


@pytest.mark.parametrize("runner", ["thread", "process"])
@pytest.mark.parametrize("way", WAYS)
def test_each_layout_keeps_its_bytes(way: str, runner: str, tmp_path: Path) -> None:
    kind, parts = WAYS[way]
    if runner == "process":
        parts = 1
    entry = {"url": f"file://{tmp_path}/kv?direct_io=off", "runner": runner}
    for _ in range(2):
        with hosted(kind, **entry) as host:
            assert host.store(PROMPT) == host.load(PROMPT) == len(PROMPT)
            assert host.count("loaded_chunks") == parts * len(PROMPT)


def test_a_damaged_chunk_is_a_miss(store: Store) -> None:
    with hosted(url=store.url) as host:
        assert host.store(PROMPT) == len(PROMPT)
        store.damage()
        assert host.load(PROMPT) == 0
        assert host.failures()["load.corrupt"] == PARTS
        # The recomputed chunks replace the damaged chunks.
        assert host.store(PROMPT) == host.load(PROMPT) == len(PROMPT)


def test_no_request_fails_when_the_server_is_killed(store: Store) -> None:
    with hosted(url=store.url, load_deadline="2s", store_deadline="2s") as host:
        assert host.store(PROMPT) == host.load(PROMPT) == len(PROMPT)
        killer = threading.Timer(0.05, store.kill)
        killer.start()
        while killer.is_alive():
            host.load(PROMPT)
        # The store is now down, or its folder is empty. Requests must still be answered.
        host.store(range(20, 26))
        assert host.load(PROMPT) == 0


def keep_apart(url: str, one: Kind, other: Kind) -> None:
    with hosted(one, url=url) as host, hosted(other, url=url) as stranger:
        assert host.store(PROMPT) == len(PROMPT)
        assert stranger.load(PROMPT) == 0
        assert stranger.store(PROMPT) == len(PROMPT)
        assert host.load(PROMPT) == stranger.load(PROMPT) == len(PROMPT)


def test_two_models_on_one_store_never_meet(store: Store) -> None:
    keep_apart(store.url, KIND, Kind(model="org/model-b"))


@pytest.mark.parametrize(
    "other",
    [
        Kind(dtype="float16"),
        Kind(layout="page_first_direct"),
        Kind(layout="layer_first"),
        Kind(tp_rank=0, tp_size=2),
        Kind(is_mla=True),
    ],
    ids=["dtype", "layout", "copied", "parallelism", "latent"],
)
def test_what_else_decides_about_reuse_keeps_pages_apart(other: Kind, tmp_path: Path) -> None:
    keep_apart(f"file://{tmp_path}/kv?direct_io=off", KIND, other)


def test_ranks_have_pages_of_their_own(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv?direct_io=off"
    keep_apart(url, Kind(tp_rank=0, tp_size=2), Kind(tp_rank=1, tp_size=2))


def test_ranks_share_latent_pages_which_one_of_them_stores(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv?direct_io=off"
    first, second = (Kind(is_mla=True, tp_rank=rank, tp_size=2) for rank in range(2))
    with hosted(second, url=url) as host:
        assert host.store(PROMPT) == 0
        assert host.count("stored_chunks") == 0
    with hosted(first, url=url) as host:
        assert host.store(PROMPT) == len(PROMPT)
        hashes = host.hashes(PROMPT)
    with hosted(second, url=url) as host:
        assert host.storage.batch_exists(hashes) == len(PROMPT)
