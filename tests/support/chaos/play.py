"""Plays a scenario: runs a workload, begins and ends a fault, and compares stored chunks."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from kvtier_sdk import HostPool, Namespace, OffloadKey, TieringConfig, TierSpec, TierStats
from kvtier_sdk.cli.replay import chat_workload
from kvtier_sdk.cli.replay.driver import ChunkContent
from kvtier_sdk.engine import TieringManager, open_manager, open_pool
from support.chaos.engine import Engine
from support.chaos.places import MODEL, PLACES, Place
from support.chaos.scenarios import Outcome, Scenario
from support.live import Live

CHUNK_BYTES = 32 * 1024
SLOTS = 96
PER_SECOND = 15.0
LOOKUP_DEADLINE_S = 0.1
_NAMESPACE = Namespace({"engine": "chaos", "model": MODEL})
#: A tier that does not start or recover within this time counts as lost.
_PATIENCE_S = 60.0
#: The longest delay between a store's end and its report. The chunk can be destroyed meanwhile.
_REPORT_DELAY_S = 0.5
#: More requests than any scenario plays.
_REQUESTS = 10_000


@dataclass(frozen=True)
class Pace:
    before_s: float = 2.0  # a minimum, because the fault also waits until the tier serves a chunk
    fault_s: float = 4.0
    after_s: float = 1.0
    probe_interval_s: float = 1.0  # both the shortest and the longest interval


BRIEF = Pace(before_s=0.3, fault_s=3.0, after_s=0.2, probe_interval_s=0.25)


def play(scenario: Scenario, directory: Path, pace: Pace, seed: int = 0) -> Outcome:
    place = PLACES[scenario.backend](directory, scenario.fault.name)
    with contextlib.closing(place), patch.dict(os.environ, place.environment):
        return _play(scenario, place, pace, seed)


def _play(scenario: Scenario, place: Place, pace: Pace, seed: int) -> Outcome:
    reported = threading.Event()
    outcome = Outcome(scenario)
    tier = {
        "url": place.url,
        "runner": scenario.runner,
        "lookup_deadline": LOOKUP_DEADLINE_S,
        # Set the maximum too, because it limits every lookup if ``recompute_s`` is infinite.
        "max_lookup_deadline": LOOKUP_DEADLINE_S,
        "probe_interval": pace.probe_interval_s,
        "max_probe_interval": pace.probe_interval_s,
        "name": "tier",
    }
    options = {"slots": SLOTS, "chunk_bytes": CHUNK_BYTES, "tiers": [tier]}
    options["admin_socket"] = str(place.config.with_suffix(".sock"))
    place.config.write_text(json.dumps(options))
    config = TieringConfig.from_file(place.config)
    # This engine computes nothing, so every load must count as faster than computing.
    config = config.model_copy(update={"recompute_s": math.inf})
    with (
        open_pool(config) as pool,
        open_manager(
            pool, config, _NAMESPACE, clock=place.clock, events=True, notify=reported.set
        ) as manager,
    ):
        engine = Engine(manager, pool, reported, LOOKUP_DEADLINE_S, outcome)
        watch = _Watch(manager, engine, outcome, place, pace)
        with watch:
            engine.play(chat_workload(_REQUESTS, seed), PER_SECOND, watch.goes_on)
        outcome.left_over = manager.left_over()
        outcome.refused = manager.stats[1].not_admitted_chunks
    outcome.broken = place.broken
    since_s = watch.ended_s + _REPORT_DELAY_S if scenario.fault.destroys else 0.0
    kept = [key for key, stored_s in engine.announced.items() if stored_s >= since_s]
    outcome.stored = len(kept)
    outcome.lost = _count_lost(place, kept)
    return outcome


class _Watch:
    """Begins and ends the fault in a thread, and records the effects in the engine's thread."""

    def __init__(
        self, manager: TieringManager, engine: Engine, outcome: Outcome, place: Place, pace: Pace
    ) -> None:
        self.began_s = self.ended_s = math.inf
        self._stats = manager.stats[1]
        self._outcome = outcome
        self._place = place
        self._pace = pace
        self._is_destroyed = False
        self._engine = engine
        self._warm = threading.Event()
        self._failure: BaseException | None = None
        self._before: dict[str, int] = {}
        self._at_end: tuple[int, int] | None = None
        self._started_s = time.monotonic()
        self._back_s: float | None = None
        self._manager = manager
        self._thread = threading.Thread(target=self._disturb, name="chaos")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._warm.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def goes_on(self) -> bool:
        now_s = time.monotonic()
        stats = self._stats
        if now_s < self.began_s:
            is_well = stats.loaded_chunks and not _states(stats)
            if is_well and now_s > self._started_s + self._pace.before_s:
                self._before = _counters(self._manager.stats)
                self._warm.set()
            return self._goes_on_until(self._started_s + _PATIENCE_S)
        for state in _states(stats):
            self._outcome.shown.setdefault(state, now_s - self.began_s)
        self._engine.began_s, self._engine.is_destroyed = self.began_s, self._is_destroyed
        if now_s < self.ended_s:
            return self._failure is None
        if self._at_end is None:
            after = _counters(self._manager.stats)
            grown = {name: count - self._before.get(name, 0) for name, count in after.items()}
            self._outcome.grown = {name: count for name, count in grown.items() if count}
            self._at_end = (stats.loaded_chunks, stats.stored_chunks)
        self._note_recovery(now_s - self.ended_s, *self._at_end)
        if self._back_s is not None:
            return now_s < self._back_s + self._pace.after_s + _REPORT_DELAY_S
        return self._goes_on_until(self.ended_s + _PATIENCE_S)

    def _goes_on_until(self, end_s: float) -> bool:
        return self._failure is None and time.monotonic() < end_s

    def _note_recovery(self, after_s: float, loaded: int, stored: int) -> None:
        outcome, stats = self._outcome, self._stats
        if outcome.closed_s is None and not _states(stats):
            outcome.closed_s = after_s
        if outcome.loaded_s is None and stats.loaded_chunks > loaded:
            outcome.loaded_s = after_s
        if outcome.stored_s is None and stats.stored_chunks > stored:
            outcome.stored_s = after_s
        if self._back_s is None and None not in outcome.recovery.values():
            self._back_s = time.monotonic()

    def _disturb(self) -> None:
        try:
            self._warm.wait(_PATIENCE_S)
            self.began_s = time.monotonic()
            with getattr(self._place, self._outcome.scenario.fault.name)():
                self._is_destroyed = True
                time.sleep(self._pace.fault_s)
            self.ended_s = time.monotonic()
        except BaseException as error:
            self._failure = error


def _states(stats: TierStats) -> set[str]:
    states = {"no reads": stats.reads_open, "no stores": stats.stores_open, "slow": stats.is_slow}
    return {state for state, is_so in states.items() if is_so}


def _counters(stats: list[TierStats]) -> dict[str, int]:
    tier = stats[1]
    counted = Counter[str]()
    for kind, of in itertools.product(("misses", "failures", "dropped", "retries"), stats):
        for name, count in getattr(of, kind).items():
            counted[f"{kind}.{name}"] += count
    return counted | {
        "evicted": tier.evicted_chunks,
        "restarts": tier.restarts,
        "tier.absent": tier.absent_chunks,
    }


def _count_lost(place: Place, keys: list[OffloadKey]) -> int:
    patience = {"lookup_deadline": "30s", "load_deadline": "30s", "runner": "thread"}
    spec = TierSpec.from_url(place.clean_url, **patience)
    content = ChunkContent(CHUNK_BYTES)
    reported = threading.Event()
    lost = 0
    with (
        contextlib.closing(HostPool(SLOTS, CHUNK_BYTES)) as pool,
        open_manager(pool, [spec], _NAMESPACE, notify=reported.set) as manager,
    ):
        engine = Live(manager, pool, reported)
        for start in range(0, len(keys), SLOTS // 2):
            window = keys[start : start + SLOTS // 2]
            request = engine.begin(f"compare {start}")
            for key, name in zip(window, engine.settle(request, *window), strict=True):
                if name != "HIT":
                    lost += 1
                    continue
                spec_of_load = manager.prepare_load([key], request)
                lost += content.wrong_bytes(key, pool.view(spec_of_load.slots[0])) > 0
                manager.complete_load([key], request)
            manager.on_request_finished(request)
    return lost
