"""How the adapter is configured, what it reports, and what LMCache's L1 has to be."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmcache.v1.distributed.api import MemoryLayoutDesc
from support.lmcache_host import KIND, OBJECT_BYTES, Found, Host, Kind, hosted, wait_until
from support.redis_server import Server, free_port

from kvtier_sdk import ConfigError, UnknownBackendError

PROMPT = range(12)


def found(host: Host, chunks: Sequence[int], layout: MemoryLayoutDesc) -> list[int]:
    """Look chunks up under a layout; the answer can be had once."""
    task = host.adapter.submit_lookup_and_lock_task(KIND.keys(chunks), {0: layout})
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


def test_a_private_l1_is_used_from_a_thread(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv?direct_io=off"
    with pytest.raises(ConfigError, match="needs a process.*--no-l1-use-lazy"):
        hosted(url, shm_name="", runner="process").__enter__()
    with hosted(url, shm_name="") as host:
        host.store(PROMPT)
        host.forget()
        assert host.load(PROMPT) == Found(hits=12, equal=12)
        assert host.adapter._spec.runner.runner == "thread"


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


def test_objects_that_the_tier_has_evicted_leave_a_tenants_count_when_deleted(
    tmp_path: Path,
) -> None:
    """Otherwise a tenant would stay over its quota with objects that are gone."""
    with hosted(f"file://{tmp_path}/kv?direct_io=off&capacity=512KiB") as host:
        host.store(PROMPT, Kind(salt="alice"))
        host.forget()
        host.adapter.delete(Kind(salt="alice").keys(PROMPT))
        assert host.adapter.get_usage().bytes_by_cache_salt == {}


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
