import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache_host import (
    KIND,
    OBJECT_BYTES,
    Found,
    Host,
    Kind,
    deleted_elsewhere,
    hosted,
    stored_elsewhere,
)
from support.lmcache_server import wait_until
from support.redis_server import Server, free_port
from support.router import Router, free_endpoints
from support.stores import another_process

from kvtier_lmcache.identity import ObjectLayout, namespace_of
from kvtier_sdk import ConfigError, UnknownBackendError

from .conftest import StoreElsewhere

PROMPT = range(12)
FP8 = {"type": "fp8"}
LACK = "a process of its own cannot map LMCache's L1 memory"


def found(
    host: Host, chunks: Sequence[int], layout: MemoryLayoutDesc, kind: Kind = KIND
) -> list[int]:
    task = host.adapter.submit_lookup_and_lock_task(kind.keys(chunks), {0: layout})
    bitmaps = []

    def is_answered() -> bool:
        bitmaps.append(host.adapter.query_lookup_and_lock_result(task))
        return bitmaps[-1] is not None

    wait_until(is_answered, "the lookup to end")
    assert host.adapter.query_lookup_and_lock_result(task) is None
    indices: list[int] = bitmaps[-1].get_indices_list()
    return indices


def test_a_wrong_option_keeps_lmcache_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_params.*capacty.*capacity"):
        hosted(f"file://{tmp_path}", capacty="1GiB").__enter__()
    with pytest.raises(ConfigError, match="adapter_params.*metrics_port"):
        hosted(f"file://{tmp_path}", metrics_port="no").__enter__()
    with pytest.raises(UnknownBackendError, match="fil"):
        hosted(f"fil://{tmp_path}").__enter__()


def test_without_shared_memory_threads_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"file://{tmp_path}/kv?direct_io=off"
    flags = "start 'lmcache server' with --no-l1-use-lazy --shm-name NAME"
    with pytest.raises(ConfigError, match=f"needs a process.*{flags}"):
        hosted(url, shared=False, runner="process").__enter__()
    with hosted(url, shared=False) as host:
        host.store(PROMPT)
        host.forget()
        assert host.load(PROMPT) == Found(hits=12, equal=12)
        assert host.adapter.report_status()["runner"] == "thread"
    assert f"runs in threads, which may slow LMCache down: {LACK}" in caplog.text


def test_direct_io_reaches_lmcaches_memory(tmp_path: Path) -> None:
    with hosted(f"file://{tmp_path}/kv?direct_io=on") as host:
        host.store(PROMPT)
        host.forget()
        assert host.load(PROMPT) == Found(hits=12, equal=12)


def test_a_batch_of_which_chunks_are_missing_is_answered_one_by_one(tmp_path: Path) -> None:
    with hosted(f"file://{tmp_path}/kv?direct_io=off") as host:
        host.store([0, 1, 3, 4])
        assert found(host, range(6), KIND.layout) == [0, 1, 3, 4]


def test_deleted_objects_are_gone_and_count_for_their_tenant_no_more(tmp_path: Path) -> None:
    alice, bob = Kind(salt="alice"), Kind(salt="bob")
    with hosted(f"file://{tmp_path}/kv?direct_io=off") as host:
        for kind in (alice, bob):
            host.store(PROMPT, kind)
        host.adapter.delete(alice.keys(PROMPT[8:]))
        bytes_of = host.adapter.get_usage().bytes_by_cache_salt
        assert bytes_of == {"alice": 8 * OBJECT_BYTES, "bob": 12 * OBJECT_BYTES}
        host.forget()
        assert host.load(PROMPT, alice) == Found(hits=8, equal=8)
        assert host.load(PROMPT, bob) == Found(hits=12, equal=12)


def test_lmcache_learns_what_the_tier_evicts(tmp_path: Path) -> None:
    alice, old, new = Kind(salt="alice"), range(60), range(60, 70)
    told: dict[ObjectKey, int] = {}

    class Listener(L2AdapterListener):
        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            told.update(zip(keys, sizes, strict=True))

        def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
            pass

        def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
            for key in keys:
                told.pop(key, None)

    def agree() -> bool:
        has = len(found(host, old, alice.layout, alice) + found(host, new, alice.layout, alice))
        counted = host.adapter.get_usage().bytes_by_cache_salt
        return counted == {"alice": has * OBJECT_BYTES} and len(told) == has

    with hosted(f"file://{tmp_path}/kv?direct_io=off&capacity=1MiB") as host:
        host.adapter.register_listener(Listener())
        for chunks in (old, new):
            host.store(chunks, alice)
        assert host.count("evicted_chunks")
        wait_until(agree, "LMCache's count to be that of the tier")
        # Storing a chunk again must not count it twice.
        host.forget()
        host.store(new, alice)
        wait_until(agree, "the count of objects that are stored again")
        host.adapter.delete(alice.keys([*old, *new]))
        assert host.adapter.get_usage().bytes_by_cache_salt == {}
        assert not told


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_router_hears_what_the_store_has_whoever_changes_it(tmp_path: Path, runner: str) -> None:
    url, endpoints = f"file://{tmp_path}/kv?direct_io=off", free_endpoints()
    options = {
        "runner": runner,
        "scan_interval": "200ms",
        "events_endpoint": endpoints[0],
        "events_replay_endpoint": endpoints[1],
    }

    def blocks(chunks: Sequence[int]) -> list[int]:
        return [ObjectKey.Bytes2IntHash(key.chunk_hash) for key in KIND.keys(chunks)]

    router = Router(*endpoints)
    with another_process() as process, hosted(url, **options) as host:
        host.store(PROMPT)
        # Routers must not receive a tenant's chunk, or one rank's half of a chunk.
        host.store([20], Kind(salt="alice"))
        host.store([21], Kind(world_size=2))
        router.await_blocks(blocks(PROMPT))
        process.submit(deleted_elsewhere, url, PROMPT[8:], KIND).result()
        router.await_blocks(blocks(PROMPT[:8]))
        assert process.submit(stored_elsewhere, url, [22], KIND).result() == 1
        router.await_blocks(blocks([*PROMPT[:8], 22]))
    late = Router(*endpoints)
    with hosted(url, **options) as host:
        really = found(host, range(30), KIND.layout)
        assert really == [*range(8), 22]
        for one in (router, late):
            one.catch_up()
            one.await_blocks(blocks(really))
            one.close()


def test_another_process_finds_8_bit_data(tmp_path: Path, store_elsewhere: StoreElsewhere) -> None:
    url = f"file://{tmp_path}/kv?direct_io=off"
    assert store_elsewhere(url, PROMPT, serde=FP8) == len(PROMPT)
    with hosted(url, serde=FP8) as host:
        assert host.load(PROMPT) == Found(hits=12, equal=12)
        host.store(range(20, 24))
        assert host.adapter.get_usage().bytes_by_cache_salt == {"": 4 * OBJECT_BYTES // 2}
    for other in (None, {"type": "fp8", "fp8_dtype": "float8_e5m2"}):
        with hosted(url, serde=other) as host:
            assert host.load(PROMPT) == Found(hits=0, equal=0)


def test_a_serde_of_unknown_length_keeps_lmcache_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="\"serde\" of type 'turboquant'.*leave it out"):
        hosted(f"file://{tmp_path}", serde={"type": "turboquant"}).__enter__()


def test_a_lookup_without_a_layout_finds_what_was_stored(tmp_path: Path) -> None:
    with hosted(f"file://{tmp_path}/kv?direct_io=off") as host:
        host.store(PROMPT)
        assert found(host, PROMPT, MemoryLayoutDesc([], [])) == list(PROMPT)


def test_counters_fill_and_state_are_reported(tmp_path: Path) -> None:
    port = free_port()
    url = f"file://{tmp_path}/kv?direct_io=off&capacity=1GiB"
    with hosted(url, metrics_port=port) as host:
        host.store(PROMPT)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text = page.read().decode()
        wanted = 'kvtier_stored_chunks_total{tier="file:org/model-a"} 12.0'
        assert wanted in text.splitlines()
        (tier,) = host.adapter.report_status()["tiers"]
        assert tier["is_open"]
        assert tier["stored_chunks"] == len(PROMPT)
    with hosted(url) as host:
        assert host.load(PROMPT).hits == len(PROMPT)
        usage = host.adapter.get_usage()
        assert usage.total_bytes_used > len(PROMPT) * OBJECT_BYTES
        assert usage.total_capacity_bytes == 2**30


def test_a_store_that_was_away_at_the_start_is_used_when_it_is_back(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis")
    with hosted(f"{server.url}?probe_interval=100ms&retry_delay=10ms") as host:
        assert host.load(PROMPT) == Found(hits=0, equal=0)
        server.start()
        try:
            wait_until(lambda: host.count("is_open") == 1, "the tier to open")
            host.store(PROMPT)
            host.forget()
            assert host.load(PROMPT) == Found(hits=12, equal=12)
        finally:
            server.kill()


def test_an_adapter_is_taken_out_and_put_back_while_lmcache_serves(tmp_path: Path) -> None:
    with hosted(f"file://{tmp_path}/kv?direct_io=off") as host:
        host.store(PROMPT)
        host.forget()
        ((descriptor, _),) = host.manager.l2_adapters()
        host.manager.delete_l2_adapter(descriptor.index)
        assert host.load(PROMPT) == Found(hits=0, equal=0)
        host.manager.add_l2_adapter(descriptor.config)
        assert host.load(PROMPT) == Found(hits=12, equal=12)


def test_the_dtype_of_an_object_is_that_of_all_its_tensors() -> None:
    for dtypes, said in (
        ([torch.bfloat16, torch.bfloat16], "bfloat16"),
        ([torch.bfloat16, torch.float32], "bfloat16, float32"),
    ):
        namespace = namespace_of("m", ObjectLayout.of([(2, 4), (3,)], dtypes), {})
        assert namespace.facts["dtype"] == said
