import gc
import itertools
import os
import subprocess
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.redis_server import Server, free_port
from support.router import Router, free_endpoints
from support.stores import RedisStore

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
    from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    from vllm_config import KEYS, make_config

    from kvtier_sdk import ConfigError, TierUnavailableError
    from kvtier_sdk.runner import ThreadRunner
    from kvtier_vllm import KVTierSecondaryTier

SLOTS, ROW_BYTES = 8, 8192
HIT, MISS, RETRY = base.LookupResult.HIT, base.LookupResult.MISS, base.LookupResult.RETRY

MakeTier = Callable[..., KVTierSecondaryTier]
job_ids = itertools.count()


@pytest.fixture
def memory() -> Iterator[Any]:
    region = SharedOffloadRegion(f"test-{uuid.uuid4().hex}", SLOTS, None, ROW_BYTES, ROW_BYTES)
    rows = np.asarray(region.create_kv_memoryview())
    rows[:] = np.random.default_rng(1).integers(-128, 127, rows.shape, dtype=np.int8)
    yield rows
    del rows
    region.cleanup()


@pytest.fixture
def make_tier(memory: Any) -> Iterator[MakeTier]:
    made = []

    def make(
        view: memoryview = memory.data, *, model: str | None = None, **entry: Any
    ) -> KVTierSecondaryTier:
        entry = {"type": "KVTierSecondaryTier", "module_path": "kvtier_vllm", **entry}
        entry.setdefault("lookup_deadline", "30s")
        config = make_config([entry])
        if model is not None:
            config = replace(config, model=replace(config.model, name=model))
        spec = SimpleNamespace(
            config=config,
            extra_config={"secondary_tiers": [entry]},
            kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
        )
        made.append(SecondaryTierFactory.create_secondary_tier(entry, view, spec))
        return made[-1]

    yield make
    for tier in made:
        tier.shutdown()


def request(tier: KVTierSecondaryTier, name: str) -> base.ReqContext:
    context = base.ReqContext(req_id=name)
    tier.on_new_request(context)
    return context


def move(
    tier: KVTierSecondaryTier,
    context: base.ReqContext,
    keys: list[bytes],
    slots: list[int],
    *,
    load: bool,
) -> JobResult:
    job = TransferJob(next(job_ids), keys, np.array(slots, np.int32), load, context)
    (tier.submit_load if load else tier.submit_store)(job)
    while True:
        for result in tier.get_finished_jobs():
            assert result.job_id == job.job_id
            return result


def look_up(
    tier: KVTierSecondaryTier, context: base.ReqContext, keys: list[bytes]
) -> list[base.LookupResult]:
    while RETRY in (answers := [tier.lookup(key, context) for key in keys]):
        tier.on_schedule_end(base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))
        assert list(tier.get_finished_jobs()) == []
    return answers


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_bytes_come_back_as_they_went(make_tier: MakeTier, memory: Any, runner: str) -> None:
    tier = make_tier(url="memory:", runner=runner)
    stored = request(tier, "stores")
    assert move(tier, stored, KEYS[:2], [3, 5], load=False).success
    loads = request(tier, "loads")
    assert look_up(tier, loads, KEYS[:3]) == [HIT, HIT, MISS]
    result = move(tier, loads, KEYS[:2], [0, 1], load=True)
    assert result.success
    assert result.transfer_bytes == 2 * ROW_BYTES
    assert (memory[[0, 1]] == memory[[3, 5]]).all()
    for context in (stored, loads):
        tier.on_request_finished(context)
    assert tier.under_way == 0


def test_a_load_that_failed_is_a_miss_for_its_request(make_tier: MakeTier, tmp_path: Path) -> None:
    tier = make_tier(backend="file", root=str(tmp_path), direct_io="off")
    assert move(tier, request(tier, "stores"), KEYS[:2], [3, 5], load=False).success
    loads = request(tier, "loads")
    assert look_up(tier, loads, KEYS[:2]) == [HIT, HIT]
    (chunk,) = (path for path in tmp_path.rglob(f"*{KEYS[0].hex()}*") if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    result = move(tier, loads, KEYS[:2], [0, 1], load=True)
    assert not result.success
    assert list(result.successful_keys or ()) == [KEYS[1]]
    # After a failed load, the request does not look the chunk up again.
    assert look_up(tier, loads, KEYS[:2]) == [MISS, HIT]
    assert tier.stats.failures == {"load.corrupt": 1}


def test_what_the_queue_has_no_room_for_is_refused_at_once(make_tier: MakeTier) -> None:
    tier = make_tier(url="memory:?latency=10s", max_queue=ROW_BYTES)
    context = request(tier, "stores")
    for key, slot in zip(KEYS[:2], (1, 2), strict=True):
        job = TransferJob(slot, [key], np.array([slot], np.int32), False, context)
        tier.submit_store(job)
    (refused,) = tier.get_finished_jobs()
    assert (refused.job_id, refused.success) == (2, False)
    assert tier.stats.dropped == {"store.queue_full": 1}


def test_a_drain_leaves_no_job_without_a_result(make_tier: MakeTier) -> None:
    tier = make_tier(url="memory:?latency=50ms", concurrency=1, max_batch=1)
    context = request(tier, "stores")
    for slot, key in enumerate(KEYS):
        tier.submit_store(TransferJob(slot, [key], np.array([slot], np.int32), False, context))
    tier.drain_jobs()
    assert {result.job_id for result in tier.get_finished_jobs()} == set(range(len(KEYS)))


def test_vllms_manager_sees_what_the_tier_is(make_tier: MakeTier) -> None:
    tier = make_tier(url="memory:?name=shelf")
    assert tier.tier_type == "shelf"
    assert (tier.medium, tier.locality) == (base.Medium.CPU, base.Locality.LOCAL)
    assert move(tier, request(tier, "stores"), KEYS[:1], [0], load=False).success
    (event,) = tier.take_events()
    assert (event.ownership, event.removed, event.keys) == ("shelf", False, KEYS[:1])


@pytest.mark.parametrize("runner", ["thread", "process"])
def test_a_router_hears_what_the_store_has_whoever_changes_it(
    make_tier: MakeTier, tmp_path: Path, runner: str
) -> None:
    endpoints, blocks = free_endpoints(), {key: int.from_bytes(key[-12:-4], "big") for key in KEYS}
    url = f"file://{tmp_path}/kv?direct_io=off&scan_interval=200ms&runner={runner}"
    entry = {"events_endpoint": endpoints[0], "events_replay_endpoint": endpoints[1]}

    def present() -> set[int]:
        return {blocks[key] for key in KEYS if list(tmp_path.rglob(f"*{key.hex()}*"))}

    router = Router(*endpoints)
    tier = make_tier(url=url, **entry)
    assert move(tier, request(tier, "stores"), KEYS[:3], [0, 1, 2], load=False).success
    router.await_blocks({blocks[key] for key in KEYS[:3]})
    (gone,) = (path for path in tmp_path.rglob(f"*{KEYS[0].hex()}*") if path.is_file())
    subprocess.run(["rm", gone], check=True)
    router.await_blocks(present())
    tier.shutdown()
    # The next engine announces the store's chunks before its first request.
    make_tier(url=url, **entry)
    late = Router(*endpoints)
    for one in (router, late):
        one.catch_up()
        one.await_blocks(present())
        one.close()
    assert present() == {blocks[key] for key in KEYS[1:3]}


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = RedisStore(tmp_path_factory.mktemp("redis"), ROW_BYTES)
    yield f"{store.url}?name=remote"
    store.kill()


def test_private_memory(make_tier: MakeTier, remote: str, caplog: pytest.LogCaptureFixture) -> None:
    private = np.zeros((SLOTS, ROW_BYTES), np.int8).data
    with pytest.raises(ConfigError, match="option 'runner' is 'process', but the host pool is of"):
        make_tier(private, url="memory:", runner="process")
    assert type(make_tier(private, url=remote)._tier._runner) is ThreadRunner
    assert "remote: runs in a thread, which may slow the engine down" in caplog.text


def test_a_tier_that_is_refused_lets_go_of_the_memory(make_tier: MakeTier) -> None:
    gc.collect()  # close files that earlier tests left open
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match="option 'model_revision' is missing"):
        make_tier(url="memory:", model="none/such")
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_what_is_wrong_with_a_tier_reaches_the_engine_from_its_process(make_tier: MakeTier) -> None:
    open_files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierUnavailableError, match="Connection refused"):
        make_tier(url=f"redis://127.0.0.1:{free_port()}", runner="process", required=True)
    assert len(os.listdir("/proc/self/fd")) == open_files


def test_requests_wait_for_no_tier(make_tier: MakeTier, another_hash: str, tmp_path: Path) -> None:
    server = Server(tmp_path).start()
    tier = make_tier(url=f"{server.url}?connect_timeout=1h&open_deadline=1h&required=true")
    try:
        server.pause()
        assert not tier.has_pending_work()
        assert look_up(tier, request(tier, "early"), KEYS[:1]) == [MISS]
        server.resume()
        while not tier.stats.is_open:
            assert list(tier.get_finished_jobs()) == []
        assert move(tier, request(tier, "stores"), KEYS[:1], [3], load=False).success
    finally:
        server.kill()
