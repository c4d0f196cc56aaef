"""The calls that vLLM makes to the connector, on two releases of vLLM, without an engine."""

import inspect
import json
import urllib.request
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.redis_server import Server, free_port

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.tiering import base as tiering_base
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm_config import KEYS, make_config, opened_manager

    import kvtier_vllm as ours
    from kvtier_sdk import ConfigError
    from kvtier_sdk.metrics import METRICS, Histogram, TierStats
    from kvtier_sdk.tiering.search import MOST_CHUNKS
    from kvtier_vllm import compat
    from kvtier_vllm.copies import KVTierOffloadingWorker
    from kvtier_vllm.manager import KVTierOffloadingManager
    from kvtier_vllm.metrics import StatsFeed

LookupResult = base.LookupResult

IMPLEMENTED = [
    (KVTierOffloadingManager, base.OffloadingManager),
    (KVTierOffloadingWorker, base.OffloadingWorker),
    (ours.KVTierOffloadingSpec, base.OffloadingSpec),
    (ours.KVTierCPUTieringSpec, base.OffloadingSpec),
    (ours.KVTierSecondaryTier, tiering_base.SecondaryTierManager),
]


@pytest.mark.parametrize(("our_class", "their_class"), IMPLEMENTED)
def test_every_call_of_theirs_fits_a_concrete_class(our_class: type, their_class: type) -> None:
    assert not inspect.isabstract(our_class)
    for name, method in inspect.getmembers(their_class, inspect.isfunction):
        if name.startswith("__"):
            continue
        accepted = inspect.signature(getattr(our_class, name)).parameters
        for parameter in inspect.signature(method).parameters:
            assert parameter in accepted, f"{our_class.__name__}.{name} takes no {parameter!r}"


def test_a_cache_that_cannot_be_described_gives_the_slots_back() -> None:
    nothing = torch.zeros(4, 0, dtype=torch.int8)
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(nothing, 0)], [[base.CanonicalKVCacheRef(0, 0)]]
    )
    given_back = []
    with pytest.raises(ConfigError, match="has no bytes"):
        KVTierOffloadingWorker(
            caches, np.zeros((4, 64), np.uint8), 1, lambda: given_back.append(True)
        )
    assert given_back == [True]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_copies_wait_for_the_compute_stream(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    platform = type(compat.current_platform)
    stream = object()
    monkeypatch.setattr(platform, "is_cpu", lambda self: not on_gpu)
    monkeypatch.setattr(platform, "current_stream", lambda self: stream, raising=False)
    cache = torch.zeros(4, 64, dtype=torch.int8)
    caches = base.CanonicalKVCaches(
        [base.CanonicalKVCacheTensor(cache, 64)], [[base.CanonicalKVCacheRef(0, 64)]]
    )
    worker = KVTierOffloadingWorker(caches, np.zeros((4, 64), np.uint8), 1, lambda: None)
    found: list[object] = []
    for submit in ("submit_store", "submit_load"):
        note = lambda *_, after, **__: found.append(after)  # noqa: E731
        monkeypatch.setattr(worker._worker, submit, note)
    blocks = base.GPULoadStoreSpec([1], group_sizes=[1], block_indices=[0])
    slots = base.BlockIDsLoadStoreSpec([2])
    assert worker.submit_store(1, blocks, slots)
    assert worker.submit_load(2, slots, blocks, expedited=True)
    worker.shutdown()
    assert found == [stream if on_gpu else None] * 2


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM detects its device from installed metadata, which an unpacked release lacks.
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)


@pytest.fixture
def manager() -> Iterator[KVTierOffloadingManager]:
    config = make_config([{"type": "memory", "lookup_deadline": "30s"}])
    with opened_manager(config) as manager:
        yield manager


def request(manager: KVTierOffloadingManager, name: str) -> base.ReqContext:
    context = base.ReqContext(req_id=name)
    manager.on_new_request(context)
    return context


def end_step(manager: KVTierOffloadingManager) -> None:
    manager.on_schedule_end(base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))


def step_until_open(manager: KVTierOffloadingManager) -> None:
    while not manager.stats[1].is_open:
        end_step(manager)


def store(manager: KVTierOffloadingManager, keys: list[bytes]) -> None:
    storing = request(manager, "stores")
    output = manager.prepare_store(keys, storing)
    assert output is not None
    assert output.keys_to_store == keys
    assert isinstance(output.store_spec.block_ids, np.ndarray)
    manager.complete_store(set(keys), storing)
    manager.on_request_finished(storing)
    while manager.has_pending_work():
        end_step(manager)


def look_up(
    manager: KVTierOffloadingManager, keys: list[bytes], context: base.ReqContext
) -> list[base.LookupResult]:
    while True:
        results = [manager.lookup(key, context) for key in keys]
        if set(results) <= {LookupResult.HIT, LookupResult.MISS}:
            return results
        end_step(manager)


def test_a_chunk_goes_down_and_comes_back(manager: KVTierOffloadingManager) -> None:
    store(manager, KEYS[:2])
    manager.reset_cache()
    manager.on_reset_flushed()
    assert manager.usage().free == manager.usage().slots
    context = request(manager, "loads")
    found = [result.name for result in look_up(manager, KEYS[:3], context)]
    assert found == ["HIT", "HIT", "MISS"]
    spec = manager.prepare_load(KEYS[:2], context)
    assert len(spec.block_ids) == 2
    assert manager.get_load_source(KEYS[0], context) is CacheHitSource.HOST
    manager.complete_load(set(KEYS[:2]), context)
    manager.on_request_finished(context)
    assert manager.usage().pinned == 0


def test_a_load_also_uses_the_chunks_before_it_that_the_device_has() -> None:
    keys = [base.make_offload_key(bytes([n]) * 32, 0) for n in range(10)]
    with opened_manager(make_config([], eviction_policy="lru")) as manager:
        store(manager, keys[:4])
        store(manager, keys[4:8])
        loading = request(manager, "loads")
        for place, key in enumerate(keys[:4]):
            loading.set_offload_key_position(key, 16 * (place + 1))
        assert look_up(manager, keys[2:4], loading) == [LookupResult.HIT] * 2
        manager.prepare_load(keys[2:4], loading)
        manager.complete_load(set(keys[2:4]), loading)
        end_step(manager)
        output = manager.prepare_store(keys[8:], loading)
        assert output is not None
        assert sorted(output.evicted_keys) == keys[6:8]


def test_a_request_that_waits_is_put_off_after_two_lookups() -> None:
    # This key belongs to a second KV-cache group. The tier does not answer during the test.
    group = KEYS[0][:-4] + (1).to_bytes(4, "big")
    config = make_config([{"type": "memory", "latency": "30s", "lookup_deadline": "30s"}])
    with opened_manager(config) as manager:
        context = request(manager, "waits")

        def answers(*keys: bytes) -> list[str]:
            return [manager.lookup(key, context).name for key in keys]

        assert answers(*KEYS[:3], group) == ["RETRY"] * 4
        end_step(manager)
        # Each scan gets a RETRY within two lookups, whatever its order and length.
        assert answers(*KEYS[:2]) == ["RETRY", "MISS"]
        assert answers(group) == ["RETRY"]
        assert answers(KEYS[0]) == answers(KEYS[0]) == ["RETRY"]
        assert answers(*reversed(KEYS[1:3])) == ["MISS", "RETRY"]
        end_step(manager)
        # The device now has the first chunk, so the scan begins at the second.
        assert answers(*KEYS[1:3]) == ["RETRY", "RETRY"]


def test_a_request_beyond_the_limit_is_put_off_after_two_lookups() -> None:
    config = make_config([{"type": "memory", "latency": "30s", "lookup_deadline": "30s"}])
    with opened_manager(config) as manager:
        first, second = request(manager, "first"), request(manager, "second")
        keys = [bytes(32) + index.to_bytes(4, "big") for index in range(MOST_CHUNKS)]
        assert {manager.lookup(key, first).name for key in keys} == {"RETRY"}
        for _ in range(2):
            answers = [manager.lookup(key, second).name for key in KEYS[:2]]
            assert answers == ["RETRY", "MISS"]
            end_step(manager)


@pytest.mark.parametrize(
    ("medium", "found"), [("CPU", LookupResult.HIT), ("STORAGE", LookupResult.MISS)]
)
def test_a_request_is_served_by_the_tiers_that_it_allows(
    manager: KVTierOffloadingManager, medium: str, found: base.LookupResult
) -> None:
    store(manager, KEYS[:1])
    manager.reset_cache()
    matcher = base.TierMatcher(medium=base.Medium(medium))
    context = base.ReqContext(req_id="x", load_tier_filter=base.TierFilter((matcher,)))
    manager.on_new_request(context)
    assert look_up(manager, KEYS[:1], context) == [found]
    manager.on_request_finished(context)
    assert look_up(manager, KEYS[:1], request(manager, "anybody")) == [LookupResult.HIT]


def test_events_say_where_chunks_are(manager: KVTierOffloadingManager) -> None:
    store(manager, KEYS[:2])
    events = [(e.medium, e.locality, e.ownership, e.removed) for e in manager.take_events()]
    local = base.Medium.CPU, base.Locality.LOCAL
    assert events == [(*local, None, False), (*local, "memory", False)]


def test_every_metric_that_is_emitted_is_declared(manager: KVTierOffloadingManager) -> None:
    store(manager, KEYS[:2])
    stats = manager.get_stats()
    assert stats is not None
    declared = ours.KVTierOffloadingSpec.build_metric_definitions({})
    emitted = stats.data["data"]
    assert emitted["kvtier_stored_chunks_total"][("memory",)] == 2
    for name, values in emitted.items():
        assert all(len(labels) == len(declared[name].labelnames) for labels in values)


def test_what_is_zero_is_told_once_and_then_its_changes(manager: KVTierOffloadingManager) -> None:
    stats = manager.get_stats()
    assert stats is not None
    first = stats.data["data"]
    assert first["kvtier_read_breaker_open"][("memory",)] == 0
    assert first["kvtier_pool_pinned_slots"] == {(): 0}
    assert first["kvtier_loaded_chunks_total"][("memory",)] == 0
    assert manager.get_stats() is None
    store(manager, KEYS[:2])
    stats = manager.get_stats()
    assert stats is not None
    assert "kvtier_read_breaker_open" not in stats.data["data"]
    assert stats.data["data"]["kvtier_stored_chunks_total"][("memory",)] == 2


def test_the_last_step_before_a_sleep_reports_all_work(manager: KVTierOffloadingManager) -> None:
    stored, pinned = 0, {}
    context = request(manager, "stores")
    output = manager.prepare_store(KEYS[:2], context)
    assert output is not None
    manager.complete_store(set(KEYS[:2]), context)
    manager.on_request_finished(context)
    while manager.has_pending_work():
        end_step(manager)
        told = manager.get_stats()
        if told is not None:
            values = told.data["data"]
            stored += values.get("kvtier_stored_chunks_total", {}).get(("memory",), 0)
            pinned = values.get("kvtier_pool_pinned_slots", pinned)
    assert stored == manager.stats[1].stored_chunks == 2
    assert pinned == {(): 0}


def test_the_schedulers_process_has_an_endpoint_of_its_own() -> None:
    port = free_port()
    config = make_config(["memory:"], metrics_port=port - 1)
    config = replace(config, parallel=replace(config.parallel, data_parallel_index=1))
    with (
        opened_manager(config),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply,
    ):
        assert b'kvtier_stored_chunks_total{tier="memory"} 0.0' in reply.read()


def test_a_reset_keeps_slots_until_their_copies_have_ended(
    manager: KVTierOffloadingManager,
) -> None:
    context = request(manager, "stores")
    manager.prepare_store(KEYS[:3], context)
    manager.reset_cache()
    assert manager.usage().quarantined == 3
    if compat.ANNOUNCES_END_OF_RESET:
        for _ in range(10):
            end_step(manager)
        assert manager.usage().quarantined == 3
        manager.on_reset_flushed()
    else:
        # The first step makes the workers wait, and two more steps may begin before the first ends.
        for _ in range(3):
            end_step(manager)
            assert manager.usage().quarantined == 3
            assert manager.has_pending_work()
        end_step(manager)
    assert manager.usage().quarantined == 0


def facts_in(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["facts"] for path in root.rglob("manifest.json")]


def test_the_namespace_is_certain_at_the_first_request(another_hash: str, tmp_path: Path) -> None:
    config = make_config([{"type": "file", "root": str(tmp_path), "lookup_deadline": "30s"}])
    with opened_manager(config) as manager:
        assert [facts["hash_algorithm"] for facts in facts_in(tmp_path)] == ["sha256"]
        # vLLM makes this call before the first request.
        manager.has_pending_work()
        step_until_open(manager)
        store(manager, KEYS[:1])
        algorithms = {facts["hash_algorithm"] for facts in facts_in(tmp_path)}
        assert algorithms == {"sha256", another_hash}
        manager.reset_cache()
        assert look_up(manager, KEYS[:1], request(manager, "loads")) == [LookupResult.HIT]


def test_the_first_request_waits_for_no_tier(another_hash: str, tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    patience = "connect_timeout=1h&open_deadline=1h&lookup_deadline=30s"
    url = f"{server.url}?required=true&{patience}"
    try:
        with opened_manager(make_config([url])) as manager:
            server.pause()
            assert look_up(manager, KEYS[:1], request(manager, "x")) == [LookupResult.MISS]
            server.resume()
            step_until_open(manager)
            store(manager, KEYS[:1])
            assert manager.stats[1].stored_chunks == 1
    finally:
        server.kill()


def test_a_counter_that_begins_again_never_goes_down() -> None:
    feed = StatsFeed()
    counts = []
    for failures in (3, 1, 2):
        stats = feed.take([TierStats("t", "memory", open_failures=failures)])
        assert stats is not None
        counts.append(stats.data["data"]["kvtier_open_failures_total"][("t",)])
    assert counts == [3, 1, 1]


def test_observations_of_a_histogram_keep_their_buckets_and_their_sum() -> None:
    tier = TierStats("t", "memory")
    seconds = tier.job_s["load"]
    feed = StatsFeed()

    def told() -> list[float]:
        stats = feed.take([tier])
        assert stats is not None
        observed: list[float] = stats.data["data"]["kvtier_job_seconds"]["t", "load"]
        return observed

    assert told() == []
    seconds.observe(0.3)
    assert told() == [pytest.approx(0.3)]
    before = seconds.value
    for value in (0.0001, 0.003, 0.004, 29.0, 31.0, 300.0):
        seconds.observe(value)
    copy = Histogram(next(m for m in METRICS if m.name == "kvtier_job_seconds").bounds)
    observed = told()
    for value in observed:
        copy.observe(value)
    gained = [now - old for now, old in zip(seconds.counts, before.counts, strict=True)]
    assert copy.counts == gained
    assert sum(observed) == pytest.approx(seconds.total - before.total)


def test_a_full_host_pool_is_no_room(manager: KVTierOffloadingManager) -> None:
    context = request(manager, "stores")
    many = [base.make_offload_key(bytes([n]) * 32, 0) for n in range(10, 10 + 8)]
    output = manager.prepare_store(many, context)
    assert output is not None
    assert len(output.keys_to_store) == 8
    assert manager.prepare_store(KEYS[:2], context) is None


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"cpu_bytes_to_use": "1KiB"}, "'cpu_bytes_to_use' is 1 KiB, and one chunk takes 8 KiB"),
        ({"copies": "vllm"}, "option 'copies' is 'vllm', which does not copy on a CPU"),
    ],
)
def test_a_wrong_option_is_a_sentence(extra: dict[str, Any], complaint: str) -> None:
    config = make_config([], **extra)
    with pytest.raises(Exception) as error, opened_manager(config):
        pass
    assert complaint in str(error.value)
