import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.utils import hash_str_to_int64
from support.redis_server import free_port
from support.router import Router, free_endpoints
from support.sglang_host import KIND, PAGE_TOKENS, Host, Kind, hosted, make_pool

from kvtier_sdk import ConfigError
from kvtier_sglang.identity import PageIdentity

from .conftest import StoreElsewhere

PROMPT = range(8)
PARTS = 2 * len(PROMPT)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/kv?direct_io=off"


def indices(pages: int) -> torch.Tensor:
    return torch.arange(pages * PAGE_TOKENS)


def sidecar(host: Host, keys: list[str] | None = None, **options: object) -> PoolTransfer:
    return PoolTransfer(PoolName.DRAFT, host_indices=indices(len(keys or [])), keys=keys, **options)


@pytest.fixture
def two_pools(url: str) -> Host:
    host = Host(KIND, url=url)
    host.storage.register_mem_host_pool_v2(make_pool(Kind(layout="layer_first")), PoolName.DRAFT)
    return host


def test_pages_of_two_pools_come_back(two_pools: Host) -> None:
    storage, hashes = two_pools.storage, two_pools.hashes(PROMPT)
    draft = storage.registered_pools[PoolName.DRAFT]
    for pool in (two_pools.pool, draft):
        pool.kv_buffer.normal_()
    kept = [pool.get_data_page(0).clone() for pool in (two_pools.pool, draft)]
    transfers = [
        PoolTransfer(PoolName.KV, host_indices=indices(len(PROMPT)), keys=hashes),
        sidecar(two_pools, hashes),
    ]
    every = {PoolName.KV: [True] * len(PROMPT), PoolName.DRAFT: [True] * len(PROMPT)}
    assert storage.batch_set_v2(transfers) == every
    for pool in (two_pools.pool, draft):
        pool.kv_buffer.zero_()
    assert storage.batch_get_v2(transfers) == every
    for pool, before in zip((two_pools.pool, draft), kept, strict=True):
        assert torch.equal(pool.get_data_page(0), before)
    two_pools.detach()


def test_a_prefix_is_as_long_as_each_pool_has_what_it_needs(two_pools: Host) -> None:
    storage, hashes = two_pools.storage, two_pools.hashes(PROMPT)
    assert all(storage.batch_set_v1(hashes[:6], indices(6)))
    kept = [hashes[page] for page in (0, 1, 3)]
    assert storage.batch_set_v2([sidecar(two_pools, kept)]) == {PoolName.DRAFT: [True] * 3}

    alone = storage.batch_exists_v2(hashes)
    assert (alone.kv_hit_pages, alone.extra_pool_hit_pages) == (6, {PoolName.KV: 6})
    every = storage.batch_exists_v2(hashes, [sidecar(two_pools)])
    assert every.kv_hit_pages == 2
    assert every.restorable_prefix_pages == [1, 2]
    trailing = storage.batch_exists_v2(
        hashes, [sidecar(two_pools, hashes[:1], hit_policy=PoolHitPolicy.TRAILING_PAGES)]
    )
    assert trailing.kv_hit_pages == 4
    assert trailing.restorable_prefix_pages == [1, 2, 4]
    assert trailing.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.DRAFT: 4}
    two_pools.detach()


def test_single_pages_go_as_tensors(url: str) -> None:
    with hosted(Kind(zero_copy=False), url=url) as host:
        (page,) = host.hashes([0])
        content = host.content(0)
        target = torch.zeros_like(content)
        assert not host.storage.exists(page)
        assert host.storage.get(page, target) is None
        assert host.storage.set(page, content)
        assert host.storage.exists(page)
        assert host.storage.get(page, target) is target
        assert torch.equal(target, content)


def test_places_and_tensors_of_one_storage_do_not_mix(url: str) -> None:
    with hosted(url=url) as host:
        (page,) = host.hashes([0])
        assert not host.storage.set(page, host.content(0))
        assert host.storage.get(page, host.content(0)) is None


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_places_of_other_pages_than_named_move_nothing(layout: str, url: str) -> None:
    with hosted(Kind(layout=layout), url=url) as host:
        hashes = host.hashes(PROMPT)
        for places in (indices(len(PROMPT))[:-1], indices(len(PROMPT) + 1)):
            assert host.storage.batch_set_v1(hashes, places) == [False] * len(PROMPT)
        assert host.storage.batch_exists(hashes) == 0


def test_a_storage_is_cleared_for_its_own_model(url: str) -> None:
    other = Kind(model="org/model-b")
    with hosted(url=url) as host, hosted(other, url=url) as stranger:
        assert host.store(PROMPT) == stranger.store(PROMPT) == len(PROMPT)
        host.storage.clear()
        assert host.load(PROMPT) == 0
        assert stranger.load(PROMPT) == len(PROMPT)
        # Try repeatedly, because a cleared storage accepts pages only once old pages are deleted.
        for _ in range(200):
            if host.store(PROMPT) == len(PROMPT):
                break
            threading.Event().wait(0.05)
        assert host.load(PROMPT) == len(PROMPT)


def test_a_storage_is_detached_and_attached_while_sglang_runs(url: str) -> None:
    with hosted(url=url) as host:
        assert host.store(PROMPT) == len(PROMPT)
        host.detach()
        assert not host.controller.enable_storage
        # Idle threads end by themselves after a while, so wait for them.
        for thread in threading.enumerate():
            if thread.name.startswith("kvtier-"):
                thread.join(30)
                assert not thread.is_alive()
        host.attach(url=url)
        assert host.load(PROMPT) == len(PROMPT)


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_router_hears_what_the_store_has_whoever_changes_it(
    url: str, tmp_path: Path, store_elsewhere: StoreElsewhere, runner: str
) -> None:
    endpoints = free_endpoints()
    tier = {
        "url": url,
        "runner": runner,
        "scan_interval": "200ms",
        "events_endpoint": endpoints[0],
        "events_replay_endpoint": endpoints[1],
    }
    ours, theirs = Kind(tp_size=2), Kind(tp_rank=1, tp_size=2)
    router = Router(*endpoints)
    with hosted(ours, **tier) as host:

        def blocks(*prompts: Sequence[int]) -> list[int]:
            return [hash_str_to_int64(page) for pages in prompts for page in host.hashes(pages)]

        assert host.store(PROMPT) == len(PROMPT)
        router.await_blocks(blocks(PROMPT))
        assert store_elsewhere([8, 9], ours, url=url, runner=runner) == 2
        assert store_elsewhere([10, 11], theirs, url=url, runner=runner) == 2
        router.await_blocks(blocks(PROMPT, [8, 9]))
        # A page has a file of keys and one of values. If either is lost, the page is missing.
        names = [page.encode().hex() for page in host.hashes(PROMPT)[6:]]
        lost = [next(path for path in tmp_path.rglob(f"*{name}*")) for name in names]
        subprocess.run(["rm", *lost], check=True)
        router.await_blocks(blocks(PROMPT[:6], [8, 9]))
        assert [host.storage.exists(page) for page in host.hashes(PROMPT)] == 6 * [True] + 2 * [
            False
        ]
    late = Router(*endpoints)
    with hosted(ours, **tier):
        for one in (router, late):
            one.catch_up()
            one.await_blocks(blocks(PROMPT[:6], [8, 9]))
            one.close()


def test_figures_for_sglangs_own_metrics(url: str) -> None:
    with hosted(url=url) as host:
        host.store(PROMPT)
        host.load(PROMPT)
        figures = host.storage.get_stats()
        assert figures.backup_pgs == figures.prefetch_pgs == [len(PROMPT)]
        assert len(figures.backup_bandwidth) == len(figures.prefetch_bandwidth) == 1
        assert host.storage.get_stats().prefetch_pgs == []


def test_each_rank_serves_metrics_at_a_port_of_its_own(url: str) -> None:
    port = free_port()
    with hosted(Kind(tp_rank=1, tp_size=2), url=url, metrics_port=port - 1) as host:
        host.store(PROMPT)
        with urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    assert f'kvtier_stored_chunks_total{{tier="file:org/model-a"}} {PARTS}.0' in text


def test_a_mistake_ends_the_attachment() -> None:
    with pytest.raises(Exception, match="'tier.capcity'; did you mean 'capacity'"):
        Host(KIND, url="file:///data/kv", capcity="1GiB")


def test_a_missing_tier_says_what_to_write() -> None:
    from kvtier_sglang.config import read_config

    with pytest.raises(ConfigError, match='"tier": "file:///data/kv"'):
        read_config({"backend_name": "kvtier"})
    tier, _, zero_copy = read_config({"tier": "file:///data/kv?capacity=1GiB", "interface_v1": 1})
    assert tier.backend == "file"
    assert zero_copy


@pytest.mark.parametrize(
    ("index_head_dim", "dtype"), [(None, "bfloat16"), (128, "unknown")], ids=["plain", "indexed"]
)
def test_pages_with_an_index_have_no_known_dtype(url: str, index_head_dim: int, dtype: str) -> None:
    config = Host(KIND, url=url).storage._config
    pool = SimpleNamespace(dtype=torch.bfloat16, index_head_dim=index_head_dim)
    assert PageIdentity(config, pool, "kv", {}).namespace.facts["dtype"] == dtype
