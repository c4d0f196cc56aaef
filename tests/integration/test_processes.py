"""A manager works with tiers in threads and in processes, even if the processes are killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
from pathlib import Path

import pytest
from support.live import Live, live
from support.runners import RUNNERS

from kvtier_sdk import Namespace, OffloadKey, SystemClock, TieringConfig, make_offload_key
from kvtier_sdk.cli.replay import chat_workload, replay
from kvtier_sdk.engine import open_manager, open_pool
from kvtier_sdk.runner import ProcessRunner

_ALL = [make_offload_key(index.to_bytes(8, "big") * 4) for index in range(600)]
KEYS, NEW_KEYS = _ALL[:400], _ALL[400:]


class ImpatientClock(SystemClock):
    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(min(delay_s, 0.01))


def test_a_replay_through_processes_hits_what_one_through_threads_does(tmp_path: Path) -> None:
    workload = chat_workload(40, seed=5)
    hits = []
    for runner in RUNNERS:
        urls = [f"{place}?runner={runner}" for place in ("memory:", f"file://{tmp_path}/{runner}")]
        options = {"slots": 60, "chunk_bytes": "8KiB", "tiers": urls}
        report = replay(workload, TieringConfig.from_dict(options))
        assert report.wrong_bytes == 0
        assert set(report.left_over.values()) == {0}
        assert sum(stats.loaded_chunks for stats in report.tiers[1:])
        assert all(stats.failures == {} for stats in report.tiers)
        hits.append(report.hit_chunks)
    assert hits[0] == hits[1]


def test_a_process_finds_what_only_the_engine_can_import(
    third_party_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(third_party_site))
    options = {"slots": 4, "chunk_bytes": 64, "tiers": ["mine:?runner=process"]}
    config = TieringConfig.from_dict(options)
    with open_pool(config) as pool, open_manager(pool, config, Namespace({})) as manager:
        assert [stats.name for stats in manager.stats] == ["host", "mine"]


class Killer:
    """A driver that stores and loads chunks while it kills the file tier's process."""

    def __init__(self, engine: Live) -> None:
        self.engine = engine
        self.rng = random.Random(1)
        self._client = engine.manager._tiers[0].client
        self._names = itertools.count()
        self._last_pid: int | None = None
        self.keys = KEYS
        self.stored: set[OffloadKey] = set()
        self.hits = 0

    @property
    def pid(self) -> int | None:
        assert isinstance(self._client._runner, ProcessRunner)
        return self._client._runner.pid

    def await_process(self) -> int:
        for _ in range(6000):
            ready = self._client.takes_reads and self._client.takes_stores
            if ready and self.pid not in (None, self._last_pid):
                self._last_pid = pid = self.pid
                assert pid is not None
                return pid
            self.engine.step()
        raise AssertionError("the process does not come back")

    def store(self, count: int) -> None:
        request = self.engine.begin(f"store {next(self._names)}")
        keys = self.rng.sample(self.keys, count)
        self.engine.store(request, *keys)
        self.engine.manager.on_request_finished(request)
        self.stored.update(keys)

    def load(self, count: int) -> None:
        request = self.engine.begin(f"load {next(self._names)}")
        keys = self.rng.sample(sorted(self.stored), count)
        names = self.engine.settle(request, *keys)
        found = [key for key, name in zip(keys, names, strict=True) if name == "HIT"]
        self.engine.load(request, *found)
        self.engine.manager.on_request_finished(request)
        self.engine.rest()
        self.hits += len(found)

    def kill_soon(self) -> threading.Thread:
        pid, delay_s = self.await_process(), self.rng.uniform(0.0, 0.006)

        def kill() -> None:
            threading.Event().wait(delay_s)
            os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=kill)
        thread.start()
        return thread


def test_a_process_that_is_killed_again_and_again_loses_work_and_nothing_else(
    tmp_path: Path,
) -> None:
    url = f"file://{tmp_path}?runner=process"
    with live([url], slots=40, clock=ImpatientClock()) as engine:
        killer = Killer(engine)
        killer.store(32)
        for number in range(6):
            thread = killer.kill_soon()
            (killer.load if number % 2 else killer.store)(12)
            thread.join()
            assert set(engine.manager.left_over().values()) == {0}
        killer.await_process()
        # Killed processes can lose chunks, so use new keys, which must all be found.
        killer.keys, killer.stored, killer.hits = NEW_KEYS, set(), 0
        for _ in range(6):
            killer.store(12)
        for _ in range(6):
            killer.load(12)
        assert killer.hits == 6 * 12
        assert engine.manager.stats[1].failures.keys() <= {
            f"{operation}.{reason}"
            for operation in ("lookup", "load", "store")
            for reason in ("unavailable", "not_found")
        }
