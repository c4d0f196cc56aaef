import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.live import Live, live
from support.mooncake_store import MooncakeStore

from kvtier_sdk import TierStats, make_offload_key
from kvtier_sdk.engine import ResetScope

KEYS = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(8)]
_ATTEMPTS = 300


@pytest.fixture
def store(client: None, tmp_path: Path) -> Iterator[MooncakeStore]:
    store = MooncakeStore(tmp_path, "-client_ttl=1")
    yield store
    store.kill()


def url(store: MooncakeStore, **options: object) -> str:
    given = {"timeout": "500ms", "probe_interval": "100ms", "max_probe_interval": "100ms"} | options
    return f"{store.url}?{'&'.join(f'{name}={value}' for name, value in given.items())}"


def tier(engine: Live) -> TierStats:
    return engine.manager.stats[1]


def cold(engine: Live) -> None:
    engine.rest()
    engine.manager.reset_cache(ResetScope.PRIMARY)
    engine.manager.on_reset_flushed()


def found(engine: Live, name: str) -> list[str]:
    cold(engine)
    request = engine.begin(name)
    results = engine.settle(request, *KEYS)
    engine.load(request, *(key for key, one in zip(KEYS, results, strict=True) if one == "HIT"))
    engine.manager.on_request_finished(request)
    return results


def store_and_find(engine: Live) -> None:
    for attempt in range(_ATTEMPTS):
        request = engine.begin(f"attempt {attempt}")
        cold(engine)
        engine.store(request, *KEYS)
        engine.manager.on_request_finished(request)
        if found(engine, f"look {attempt}") == ["HIT"] * len(KEYS):
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"the tier is not used again: {tier(engine)}")


def kill_master(store: MooncakeStore) -> Callable[[], None]:
    store.kill_master()
    return store.start_master


def freeze_master(store: MooncakeStore) -> Callable[[], None]:
    store.pause()
    return store.resume


def kill_node(store: MooncakeStore) -> Callable[[], None]:
    store.nodes.pop().kill()
    return lambda: store.add_node() and None


@pytest.mark.parametrize("begin", [kill_master, freeze_master, kill_node])
def test_a_fault_costs_hits_and_nothing_else(store: MooncakeStore, begin) -> None:
    store.start()
    with live([url(store)]) as engine:
        store_and_find(engine)
        end = begin(store)
        assert found(engine, "during") == ["MISS"] * len(KEYS)
        assert tier(engine).failures
        end()
        store_and_find(engine)
        assert set(engine.manager.left_over().values()) == {0}


def test_a_store_that_starts_after_the_engine_is_used(store: MooncakeStore) -> None:
    with live([url(store)]) as engine:
        assert tier(engine).is_open == 0
        assert found(engine, "before") == ["MISS"] * len(KEYS)
        store.start()
        store_and_find(engine)
        assert tier(engine).open_failures > 0


def test_chunks_on_two_nodes_survive_one(store: MooncakeStore) -> None:
    store.start(nodes=2)
    with live([url(store, replicas=2)]) as engine:
        store_and_find(engine)
        store.nodes.pop().kill()
        # Wait, because the master directs loads to the dead node until it detects the failure.
        store.wait_until(lambda: "MISS" not in found(engine, "after"), "all chunks are found")


def test_memory_that_the_tier_lends_is_used(store: MooncakeStore) -> None:
    store.start_master()
    with live([url(store, lend="16MiB")]) as lender, live([url(store)]) as other:
        store_and_find(lender)
        assert found(other, "borrowed") == ["HIT"] * len(KEYS)
