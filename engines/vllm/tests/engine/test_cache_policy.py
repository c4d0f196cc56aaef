import random
import warnings
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload import base
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
    from vllm_config import CHUNK_BYTES, make_config, opened_manager
    from vllm_platform import on_platform

    from kvtier_sdk import SystemClock
    from kvtier_vllm import cache_policy, spec

SLOTS, SESSIONS, TURNS = 96, 40, 900
OURS = {"cache_policy": "KVTierCachePolicy", "cache_policy_module_path": "kvtier_vllm"}


class Clock(SystemClock):
    time_s = 0.0

    def now_s(self) -> float:
        return Clock.time_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    on_platform(monkeypatch, "cpu", "cpu")
    for module in (cache_policy, spec):
        monkeypatch.setattr(module, "SystemClock", Clock)


def play(manager: base.OffloadingManager) -> list[int]:
    """Play the turns of sessions with growing prefixes; return the hits of each request."""
    rng = random.Random(5)
    lengths = dict.fromkeys(range(SESSIONS), 2)
    hits = []
    Clock.time_s = 0.0
    for turn in range(TURNS):
        # A few sessions return often. The others return rarely or never.
        session = min(int(rng.expovariate(1 / 6)), SESSIONS - 1)
        if rng.random() < 0.3:
            session = SESSIONS + turn
        lengths[session] = min(lengths.get(session, 2) + 1, 12)
        Clock.time_s += rng.uniform(1, 20)
        keys = [
            base.make_offload_key(session.to_bytes(16, "big") + number.to_bytes(16, "big"), 0)
            for number in range(lengths[session])
        ]
        context = base.ReqContext(req_id=f"turn {turn}")
        hits.append(serve(manager, keys, context, late=rng.random() < 0.5))
    return hits


def serve(
    manager: base.OffloadingManager,
    keys: list[bytes],
    context: base.ReqContext,
    *,
    late: bool = False,
) -> int:
    manager.on_new_request(context)
    found = 0
    while found < len(keys) and manager.lookup(keys[found], context) is base.LookupResult.HIT:
        found += 1
    if found:
        manager.prepare_load(keys[:found], context)
        manager.complete_load(set(keys[:found]), context)
    end_step(manager)
    output = manager.prepare_store(keys[found:], context)
    # If ``late``, end the request before its last copies end, as vLLM sometimes does.
    if late:
        manager.on_request_finished(context)
        end_step(manager)
    if output:
        manager.complete_store(set(output.keys_to_store), context)
    if not late:
        manager.on_request_finished(context)
    end_step(manager)
    return found


def end_step(manager: base.OffloadingManager) -> None:
    manager.on_schedule_end(base.ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))


def test_vllms_manager_hits_what_ours_hits() -> None:
    with opened_manager(make_config([], cpu_bytes_to_use=SLOTS * CHUNK_BYTES)) as ours:
        hits = play(ours)
    theirs = CPUOffloadingManager(SLOTS, **OURS)
    found = play(theirs)
    if cache_policy.TELLS_ACCESSES:
        assert found == hits
    assert sum(found) > 0.98 * sum(hits) > 1.2 * sum(play(CPUOffloadingManager(SLOTS, "lru")))
    theirs.reset_cache()
    assert play(theirs) == found


ONE, TWO, THREE = (base.make_offload_key(bytes([number]) * 32, 0) for number in range(3))


@pytest.fixture
def manager() -> Any:
    full = CPUOffloadingManager(2, **OURS)
    for key in (ONE, TWO):
        serve(full, [key], base.ReqContext(req_id=key.hex()))
    return full


def test_a_chunk_in_use_is_not_evicted(manager: Any) -> None:
    loading = base.ReqContext(req_id="loading")
    manager.on_new_request(loading)
    manager.prepare_load([ONE], loading)
    assert manager.prepare_store([THREE], loading).evicted_keys == [TWO]
    assert manager.prepare_store([TWO], loading) is None
    manager.complete_store({THREE}, loading, success=False)
    assert manager.lookup(THREE, loading) is base.LookupResult.MISS


@pytest.mark.parametrize(("kept", "evicted"), [(ONE, TWO), (TWO, ONE)])
def test_a_chunk_of_the_store_itself_is_not_evicted(
    manager: Any, kept: bytes, evicted: bytes
) -> None:
    storing = base.ReqContext(req_id="storing")
    manager.on_new_request(storing)
    assert manager.prepare_store([kept, THREE], storing).evicted_keys == [evicted]


def test_a_request_that_a_reset_interrupts_is_forgotten(manager: Any) -> None:
    running = base.ReqContext(req_id="running")
    manager.on_new_request(running)
    manager.prepare_store([THREE], running)
    manager.reset_cache()
    manager.on_request_finished(running)
    assert not manager._policy._running
