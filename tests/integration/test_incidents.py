"""Incidents from similar systems, reproduced to show that kvtier avoids them.

Each test's docstring names a change to the code that makes the test fail.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.engine import CHUNK_BYTES, KEYS, A, B, Engine, start_promotion, stored_below
from support.live import live
from support.redis_server import Server
from support.s3_server import S3Server
from support.small_shm import run_with_shm

from kvtier_sdk import (
    ChunkNotFoundError,
    HostPool,
    Namespace,
    PoolLayout,
    RequestContext,
    TierError,
    TierSpec,
    TierUnavailableError,
)
from kvtier_sdk.engine import TierListener, open_tier

MIB = 2**20
TESTS = Path(__file__).parents[1]
EngineFactory = Callable[..., Engine]


def chunk_files(root: Path) -> list[Path]:
    """Return all chunk files, including files that are still being written."""
    return [path for pattern in ("*.kv", "*.tmp") for path in root.rglob(pattern)]


def test_case_01_a_file_is_truncated_after_its_lookup_was_a_hit(
    tmp_path: Path, runner: str
) -> None:
    """Without ``strike`` in ``Promotions._fail``, every step would try the load again."""
    with live([f"file://{tmp_path}?runner={runner}"]) as engine:
        engine.store(engine.begin("a"), KEYS[0])
    with live([f"file://{tmp_path}?runner={runner}"]) as engine:
        request = engine.begin("b")
        engine.manager.lookup(KEYS[0], request)
        engine.rest()
        [file] = chunk_files(tmp_path)
        os.truncate(file, 100)
        assert engine.settle(request, KEYS[0]) == ["MISS"]
        assert engine.settle(request, KEYS[0]) == ["MISS"]
        assert engine.manager.stats[1].failures == {"load.corrupt": 1}
        engine.rest()
        assert not file.exists()
        engine.store(request, KEYS[0])
        assert engine.settle(request, KEYS[0]) == ["HIT"]


def test_case_03_the_pool_runs_out_in_the_middle_of_a_batch(make: EngineFactory) -> None:
    """If ``Promotions.start`` counted keys that got no slot, they would seem to be loading."""
    engine = make(slots=4, manager={"store_reserve": 0.5})
    stored_below(engine, *KEYS[:4])
    assert engine.settle(B, *KEYS[:4]) == ["HIT", "HIT", "MISS", "MISS"]
    engine.load(B, *KEYS[:2])
    engine.at_rest()


def test_case_04_the_second_key_of_a_store_fails(make: EngineFactory) -> None:
    """If ``TierLoop`` gave all keys of a job one verdict, stored keys would not count."""
    engine = make()
    engine.tiers[0].on_store = lambda t: TierError("no") if t.key == KEYS[1] else None
    engine.store(A, *KEYS[:3])
    engine.at_rest()
    assert list(engine.tiers[0]._objects) == [KEYS[0], KEYS[2]]
    stats = engine.manager.stats[1]
    assert (stats.stored_chunks, stats.stored_bytes) == (2, 2 * CHUNK_BYTES)
    assert stats.failures == {"store.failed": 1}
    stored = [e.keys for e in engine.manager.take_events() if e.tier == "tier0"]
    assert stored == [[KEYS[0], KEYS[2]]]


def test_case_05_a_store_raises_what_nobody_expects(make: EngineFactory) -> None:
    """If ``TierCaller`` translated only ``TierError``, this error would not be counted."""
    engine = make()
    engine.tiers[0].raises = ZeroDivisionError("bug")
    engine.store(A, KEYS[0])
    engine.at_rest()
    engine.store(A, KEYS[1])
    engine.at_rest()
    assert list(engine.tiers[0]._objects) == [KEYS[1]]
    stats = engine.manager.stats[1]
    assert stats.failures == {"store.contract": 1}
    assert "tier0 store: raised ZeroDivisionError: bug" in stats.errors


def test_case_06_a_backend_never_answers(make: EngineFactory) -> None:
    """Without the timer in ``TierLoop._start``, the load would be pending for ever."""
    engine = make(load_deadline="5s")
    start_promotion(engine, KEYS[0])
    tier = engine.tiers[0]
    tier.gate, tier.stubborn = asyncio.Event(), True
    engine.step(6.0)
    assert engine.look(B, KEYS[0]) == ["MISS"]
    assert engine.manager.usage().quarantined == 1, "the call may still write the slot"
    engine.manager.on_request_finished(B)
    assert not engine.manager.has_pending_work(), "an engine does not spin for a hung call"
    tier.gate.set()
    engine.at_rest()


@pytest.mark.parametrize("steps", range(4))
def test_case_07_a_request_is_aborted_with_its_load_in_flight(
    make: EngineFactory, steps: int
) -> None:
    """Without ``abandon`` in ``on_request_finished``, the claim would keep its slot."""
    engine = make()
    stored_below(engine, *KEYS[:3])
    for _ in range(steps):
        engine.look(B, *KEYS[:3])
        engine.step()
    engine.manager.on_request_finished(B)
    engine.at_rest()


def test_case_08_the_request_ends_before_its_copies_do(make: EngineFactory) -> None:
    """If ``on_request_finished`` dropped the state at once, no tier would get the store."""
    engine = make()
    engine.manager.prepare_store(KEYS[:2], A)
    engine.manager.on_request_finished(A)
    engine.step()
    assert [name for name, _ in engine.tiers[0].calls] == []
    engine.manager.complete_store(KEYS[:2], A)
    engine.at_rest()
    assert [name for name, _ in engine.tiers[0].calls] == ["store"]


def test_case_09_preempted_with_a_store_in_flight_and_admitted_again(make: EngineFactory) -> None:
    """If ``prepare_store`` took slots for keys in the pool, a chunk would have two slots."""
    engine = make()
    engine.tiers[0].gate = asyncio.Event()
    engine.write(engine.manager.prepare_store(KEYS[:2], A))
    engine.manager.on_schedule_end(preempted_request_ids=["a"])
    assert engine.look(A, *KEYS[:2]) == ["HIT_PENDING"] * 2
    assert engine.manager.prepare_store(KEYS[:2], A).keys_to_store == []
    engine.manager.complete_store(KEYS[:2], A)
    engine.step()
    assert engine.look(A, *KEYS[:2]) == ["HIT"] * 2
    engine.load(A, *KEYS[:2])
    engine.tiers[0].gate.set()
    engine.at_rest()


def test_case_10_a_reset_with_a_load_in_flight(make: EngineFactory) -> None:
    """If ``PrimaryTier.forget`` freed pinned slots, the load would overwrite a chunk."""
    engine = make(slots=1)
    start_promotion(engine, KEYS[0])
    gate = engine.tiers[0].gate = asyncio.Event()
    engine.step()
    engine.manager.reset_cache()
    assert engine.manager.prepare_store([KEYS[1]], A).keys_to_store == []
    gate.set()
    engine.at_rest()
    engine.store(A, KEYS[1])
    assert engine.look(B, KEYS[1]) == ["HIT"]
    engine.load(B, KEYS[1])
    engine.manager.on_request_finished(B)
    engine.at_rest()


def test_case_11_a_deep_waiting_queue_and_a_small_pool(make: EngineFactory) -> None:
    """Without the limit in ``Promotions.start``, promotions would leave no slot for stores.

    Without the claims of requests, promoted chunks would evict each other before their use.
    """
    engine = make(slots=10, manager={"store_reserve": 0.2})
    stored_below(engine, *KEYS[:20])
    for start in range(0, 20, 4):
        names = engine.settle(B, *KEYS[start : start + 4])
        assert names == (["HIT"] * 4 if start < 8 else ["MISS"] * 4)
        output = engine.manager.prepare_store([KEYS[40 + start], KEYS[41 + start]], A)
        assert output.rejected_keys == []
        engine.manager.complete_store(output.keys_to_store, A)
        engine.step()
        engine.step()
    assert engine.look(B, *KEYS[:8]) == ["HIT"] * 8
    engine.load(B, *KEYS[:8])
    engine.at_rest()


_STOPS_IN_A_STORE = """
    import os
    from support.live import live
    def stop(*arguments):
        print("writing", flush=True)
        input()
    with live(["file://{root}?retries=0&runner=thread"]) as engine:
        engine.store(engine.begin("a"), b"good" * 9)
        os.pwritev = stop
        engine.store(engine.begin("b"), b"same" * 9)
"""


def test_case_14_a_crash_before_the_rename(tmp_path: Path) -> None:
    """Without the sweep in ``SharedUsage._reap_dead_leases``, a temporary file would stay."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_STOPS_IN_A_STORE.format(root=tmp_path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.kill()
    child.communicate()
    assert len(chunk_files(tmp_path)) == 2
    with live([f"file://{tmp_path}"]) as engine:
        assert len(chunk_files(tmp_path)) == 1
        assert engine.settle(engine.begin("c"), b"good" * 9, b"same" * 9) == ["HIT", "MISS"]
        assert engine.manager.stats[1].failures == {}


def test_case_16_three_failures_and_then_the_server_recovers(make: EngineFactory) -> None:
    """If ``DirectionHealth._probe`` did nothing, the breaker would never close.

    If ``Breaker.end_probe`` kept its doubled pause, the next outage would last longer.
    """
    engine = make(breaker_failures=3, probe_interval="1s")
    tier = engine.tiers[0]
    # During the first outage a probe fails too, which doubles the pause before the next probe.
    for outage_s, recovery_s in ((1.0, 2.0), (0.0, 1.0)):
        tier.on_store = lambda transfer: TierUnavailableError("gone", retryable=False)
        for key in KEYS[:3]:
            engine.store(A, key)
            engine.step()
        engine.runners[0].run_for(outage_s)
        engine.manager.on_schedule_end()
        assert engine.manager.stats[1].stores_open == 1
        tier.on_store = lambda transfer: None
        # No request arrives, so only the tier's own probe can close the breaker.
        engine.runners[0].run_for(recovery_s)
        engine.manager.on_schedule_end()
        assert engine.manager.stats[1].stores_open == 0
        engine.manager.reset_cache()
        engine.store(A, KEYS[0])
        engine.at_rest()
        assert list(tier._objects) == [KEYS[0]]
        engine.manager.reset_cache()


def test_case_18_a_process_starts_with_an_empty_table_beside_a_full_store(
    tmp_path: Path, runner: str
) -> None:
    """Without ``recount`` in ``SharedUsage._begin``, the store would count as empty."""
    url = f"file://{tmp_path}?runner={runner}&capacity=512KiB"
    with live([url]) as engine:
        request = engine.begin("a")
        for start in range(0, 60, 20):
            engine.store(request, *KEYS[start : start + 20])
    assert len(chunk_files(tmp_path)) == 60
    with live([url]) as engine:
        request = engine.begin("b")
        engine.store(request, *(bytes([index]) * 36 for index in range(10)))
        assert engine.manager.stats[1].evicted_chunks <= 20
        assert engine.settle(request, *KEYS[40:50]) == ["HIT"] * 10
    stored = chunk_files(tmp_path)
    assert len(stored) >= 50
    assert sum(path.stat().st_size for path in stored) <= 512 << 10


def test_case_19_the_last_request_ends_with_stores_in_flight(make: EngineFactory) -> None:
    """Without ``_flush`` in ``on_request_finished``, no later step would start the stores."""
    engine = make()
    engine.store(A, KEYS[0])
    engine.manager.on_request_finished(A)
    engine.manager.on_request_finished(B)
    assert engine.manager.has_pending_work()
    engine.runners[0].run_for(1.0)
    assert list(engine.tiers[0]._objects) == [KEYS[0]]
    assert not engine.manager.has_pending_work()


def test_case_20_a_restart_after_sigkill_where_there_is_room_for_one_pool() -> None:
    """Without ``sweep`` in ``join_named``, no later start would find room."""
    run_with_shm(
        64 << 20,
        """
        import os
        from support.pool_process import PoolProcess, names_in

        pool = "PoolLayout(20, 1 << 20, workers=2)"
        for start in ("first", "second", "third"):
            process = PoolProcess()
            process.run(f"join({start!r}, {pool})")
            room = os.statvfs("/dev/shm")
            assert room.f_bavail * room.f_frsize < 40 << 20
            process.kill()
            assert len(names_in("/dev/shm")) == 1
        """,
    )


def test_case_22_a_verdict_does_not_outlive_its_request(make: EngineFactory) -> None:
    """If the manager kept answers after their request, every step would repeat the load."""
    engine = make()
    stored_below(engine, KEYS[0])
    engine.look(A, KEYS[0])
    engine.step()
    engine.manager.on_request_finished(A)
    engine.tiers[0]._objects.clear()
    assert engine.settle(B, KEYS[0]) == ["MISS"]
    engine.tiers[0].on_load = lambda transfer: ChunkNotFoundError("gone")
    engine.step()
    assert "load" not in [name for name, _ in engine.tiers[0].calls]


@pytest.mark.parametrize("change", [-64, 64])
def test_case_23_a_stored_value_is_smaller_or_larger_than_the_slot(
    make: EngineFactory, change: int
) -> None:
    """If a load checked no length, a slot would overflow, or keep some old bytes."""
    engine = make()
    stored_below(engine, *KEYS[:2])
    stored = engine.tiers[0]._objects[KEYS[0]]
    stored.resize(len(stored) + change, refcheck=False)
    assert engine.settle(B, *KEYS[:2]) == ["MISS", "HIT"]
    assert engine.manager.stats[1].failures == {"load.corrupt": 1}
    engine.load(B, KEYS[1])
    engine.manager.on_request_finished(B)
    engine.at_rest()


def test_chunks_of_another_length_are_in_another_namespace(tmp_path: Path, runner: str) -> None:
    """If the fingerprint omitted the length, each engine would delete the other's chunks."""
    for chunk_bytes, expected in ((4096, "MISS"), (8192, "MISS"), (4096, "HIT"), (8192, "HIT")):
        with live(
            [f"file://{tmp_path}?runner={runner}"],
            namespace={"model": "m"},
            chunk_bytes=chunk_bytes,
        ) as engine:
            request = engine.begin("a")
            assert engine.settle(request, KEYS[0]) == [expected]
            if expected == "MISS":
                engine.store(request, KEYS[0])


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    started = Server(tmp_path, "--save", "").start()
    yield started
    started.kill()


def test_a_frozen_redis_is_slow_long_before_its_deadline(server: Server, runner: str) -> None:
    spec = TierSpec.from_url(server.url, runner=runner)
    with live([spec], slots=64) as engine:
        (client,) = engine.manager.clients
        request = engine.begin("a")
        engine.store(request, KEYS[0])
        server.pause()
        output = engine.manager.prepare_store(KEYS[1:3], request)
        engine.manager.complete_store(output.keys_to_store, request)
        engine.manager.on_schedule_end()
        # An idle engine runs no step, so reading the metrics must itself notice the slow tier.
        server.wait_until(lambda: client.stats_now().is_slow, "the tier is slow")
        engine.step()
        assert client.stats.is_slow
        output = engine.manager.prepare_store(KEYS[3:5], request)
        engine.manager.complete_store(output.keys_to_store, request)
        assert client.stats.dropped["store.slow"] == 2
        server.resume()
        engine.rest()
        assert (client.stats.is_slow, client.stats.stored_chunks) == (0, 3)


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_frozen_store_that_was_given_nothing_before_pins_what_it_is_given_at_once(
    tmp_path: Path, kind: str
) -> None:
    """If ``Pace`` began without a limit, stores to a frozen tier would pin half the pool."""
    server: Server | S3Server = Server(tmp_path) if kind == "redis" else S3Server(tmp_path)
    server.start()
    try:
        with live([TierSpec.from_url(server.url)], slots=160, chunk_bytes=MIB) as engine:
            (client,) = engine.manager.clients
            server.pause()
            request = engine.begin("a")
            for start in range(0, 150, 30):
                output = engine.manager.prepare_store(KEYS[start : start + 30], request)
                engine.manager.complete_store(output.keys_to_store, request)
                engine.step()
            assert engine.manager.usage().pinned == 64
            while not client.stats.is_slow:
                engine.step()
            assert engine.manager.usage().pinned == 64
            server.resume()
            engine.rest()
            assert not client.stats.is_slow
    finally:
        server.kill()


def test_whole_stores_are_bounded_too_and_a_slow_tier_gets_none(
    server: Server, runner: str
) -> None:
    """If ``whole`` stores ignored the queue's limit and ``is_slow``, a slow tier would get them."""
    spec = TierSpec.from_url(server.url, runner=runner, max_batch="1MiB")
    request = RequestContext("a")
    with (
        closing(HostPool.create(PoolLayout(40, MIB))) as pool,
        open_tier(spec, pool, Namespace({}), TierListener()) as client,
    ):
        server.pause()
        # An empty queue accepts a job of any size; otherwise a large job could never start.
        assert client.store(KEYS[:12], range(12), request, whole=True) is not None
        assert client.store(KEYS[12:13], [12], request, whole=True) is None
        client.flush()
        server.wait_until(lambda: client.stats_now().is_slow, "the tier is slow")
        client.poll()
        assert client.store(KEYS[12:13], [12], request, whole=True) is None
        assert client.stats.dropped == {"store.queue_full": 1, "store.slow": 1}
        server.resume()
        while client.has_work:
            client.poll()
        assert client.store(KEYS[12:14], range(2), request, whole=True) is not None


def test_what_was_held_back_of_an_outage_comes_before_its_end(
    server: Server, runner: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If the client logged the outage's end, the held-back lines would come a minute later."""
    spec = TierSpec.from_url(server.url, runner=runner, max_lookup_deadline="50ms")
    with live([spec], slots=64) as engine:
        request = engine.begin("a")
        engine.store(request, KEYS[0])
        server.pause()
        for key in KEYS[10:13]:
            assert engine.settle(request, key) == ["MISS"]
        output = engine.manager.prepare_store(KEYS[1:2], request)
        engine.manager.complete_store(output.keys_to_store, request)
        while not engine.manager.stats[1].is_slow:
            engine.step()
        server.resume()
        while "no longer slow" not in caplog.text:
            engine.step()
        told = [line for line in caplog.messages if "redis lookup" in line or "slow" in line]
    late = "redis lookup: 1 chunk was not done within 50 ms ('lookup_deadline')"
    assert [line.partition(" (2 of this kind")[0] for line in told] == [
        late,
        "redis: slow: no load or store has made progress for 2 s; it gets no stores",
        late,
        "redis: no longer slow",
    ]
    assert caplog.text.count(late) == 2, "and none when it is closed"
