"""Plays one scenario: a workload runs, a fault begins and ends, and what was stored is compared."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvtier_sdk import HostPool, Namespace, OffloadKey, TieringConfig, TierSpec, TierStats
from kvtier_sdk.cli.replay import chat_workload
from kvtier_sdk.cli.replay.driver import ChunkContent
from kvtier_sdk.engine import TieringManager, open_manager, open_pool
from support.chaos.engine import Engine
from support.chaos.places import MODEL, PLACES, Place
from support.chaos.scenarios import Scenario
from support.live import Live

CHUNK_BYTES = 32 * 1024
SLOTS = 96
PER_SECOND = 15.0
LOOKUP_DEADLINE_S = 0.1
_NAMESPACE = Namespace({"engine": "chaos", "model": MODEL})
#: A tier that is not back by then does not come back.
_PATIENCE_S = 60.0
#: Stores reported so soon after a medium was destroyed may have come before.
_REPORT_DELAY_S = 0.5
#: More requests than any scenario plays.
_REQUESTS = 10_000


@dataclass(frozen=True)
class Pace:
    """The durations of a scenario's parts.

    Attributes:
        before_s: until the fault begins; it also waits until the tier has served a chunk.
        fault_s: how long it lasts.
        after_s: for how long the workload goes on when the tier is back.
        probe_interval_s: of the tier, the shortest and the longest.
    """

    before_s: float = 2.0
    fault_s: float = 4.0
    after_s: float = 1.0
    probe_interval_s: float = 1.0


BRIEF = Pace(before_s=0.3, fault_s=3.0, after_s=0.2, probe_interval_s=0.25)


@dataclass
class Outcome:
    """The outcome of a scenario.

    Attributes:
        wrong_bytes: bytes that came back and were not those that were stored.
        lost: chunks that the tier was announced to have stored and does not bring back; of a
            destroyed medium only those that were stored afterwards.
        late_retries: lookups that were pending after their deadline.
        revived: chunks that were served after they had been deleted everywhere.
        restored: chunks that a destroyed medium has got again.
        refused: chunks that were kept from the tier to spare what is in it.
        broken: rules that did not hold for another engine or a command.
        shown: the states that the fault led to, each with the seconds from the fault's beginning
            until it was seen.
        closed_s: from the fault's end until the tier was in none of them; ``None`` for never.
        loaded_s: from the fault's end until the tier served a chunk; ``None`` for never.
        stored_s: from the fault's end until the tier stored a chunk; ``None`` for never.
        grown: counters that grew during the fault, by how much.
        left_over: what was held when all requests were over, and should not have been.
        stall_us: wall time of the longest call on the engine's thread, and which it was.
        stall_cpu_us: the longest time that a call was on the processor.
        median_us: wall time of a call.
        wait_s: how long a request waited for the tier, at most.
    """

    scenario: Scenario
    requests: int = 0
    compared_bytes: int = 0
    stored: int = 0
    wrong_bytes: int = 0
    lost: int = 0
    late_retries: int = 0
    revived: int = 0
    restored: int = 0
    refused: int = 0
    broken: list[str] = field(default_factory=list)
    shown: dict[str, float] = field(default_factory=dict)
    closed_s: float | None = None
    loaded_s: float | None = None
    stored_s: float | None = None
    grown: dict[str, int] = field(default_factory=dict)
    left_over: dict[str, int] = field(default_factory=dict)
    stall_us: float = 0.0
    stall_in: str = ""
    stall_cpu_us: float = 0.0
    median_us: float = 0.0
    wait_s: float = 0.0

    def breaches(self) -> list[str]:
        """Name the rules that did not hold."""
        fault = self.scenario.fault
        found = [*self.broken]
        if self.wrong_bytes:
            found.append(f"{self.wrong_bytes} wrong bytes")
        if self.lost:
            found.append(f"{self.lost} of {self.stored} stored chunks lost")
        if self.late_retries:
            found.append(f"{self.late_retries} lookups pending after their deadline")
        if fault.purges and self.revived:
            found.append(f"{self.revived} deleted chunks served")
        if fault.destroys and not self.restored:
            found.append("nothing stored a second time")
        if self.refused and not fault.fills:
            found.append(f"{self.refused} chunks refused by a tier with room")
        if not fault.shows <= self.shown.keys():
            found.append(f"shown {sorted(self.shown)}, not {sorted(fault.shows)}")
        found += [
            f"never {what} again"
            for what, after_s in (
                ("asked", self.closed_s),
                ("served", self.loaded_s),
                ("stored", self.stored_s),
            )
            if after_s is None
        ]
        if not re.search(fault.counted, " ".join(self.grown)):
            found.append(f"not counted: {self.grown}")
        found += [f"{count} {what} left over" for what, count in self.left_over.items() if count]
        return found


def play(scenario: Scenario, directory: Path, pace: Pace, seed: int = 0) -> Outcome:
    """Play a scenario.

    Args:
        scenario: the scenario.
        directory: an empty one, for what servers and tiers keep.
        pace: how long it takes.
        seed: of the workload.

    Returns:
        The outcome.

    Raises:
        CannotHappenError: the fault cannot be made on this machine.
    """
    place = PLACES[scenario.backend](directory, scenario.fault.name)
    try:
        with _environment(place.environment):
            return _play(scenario, place, pace, seed)
    finally:
        place.close()


def _play(scenario: Scenario, place: Place, pace: Pace, seed: int) -> Outcome:
    reported = threading.Event()
    outcome = Outcome(scenario)
    tier = {
        "url": place.url,
        "runner": scenario.runner,
        "lookup_deadline": LOOKUP_DEADLINE_S,
        # A new engine would wait longer.
        "max_lookup_deadline": LOOKUP_DEADLINE_S,
        "probe_interval": pace.probe_interval_s,
        "max_probe_interval": pace.probe_interval_s,
        "name": "tier",
    }
    options = {"slots": SLOTS, "chunk_bytes": CHUNK_BYTES, "tiers": [tier]}
    options["admin_socket"] = str(place.config.with_suffix(".sock"))
    place.config.write_text(json.dumps(options))
    config = TieringConfig.from_file(place.config)
    # Nothing is computed, so there is nothing to compare a load with.
    config = config.model_copy(update={"recompute_s": math.inf})
    with (
        open_pool(config) as pool,
        open_manager(
            pool, config, _NAMESPACE, clock=place.clock, events=True, notify=reported.set
        ) as manager,
    ):
        engine = Engine(manager, pool, reported, LOOKUP_DEADLINE_S)
        watch = _Watch(manager, engine, outcome, place, pace)
        with watch:
            engine.play(chat_workload(_REQUESTS, seed), PER_SECOND, watch.goes_on)
        outcome.left_over = manager.left_over()
        outcome.refused = manager.stats[1].not_admitted_chunks
    outcome.broken = place.broken
    _note(outcome, engine)
    since_s = watch.ended_s + _REPORT_DELAY_S if scenario.fault.destroys else 0.0
    kept = [key for key, stored_s in engine.announced.items() if stored_s >= since_s]
    outcome.stored = len(kept)
    outcome.lost = _count_lost(place, kept)
    return outcome


class _Watch:
    """Begins and ends the fault, in a thread, and notes on the engine's thread what it causes."""

    def __init__(
        self,
        manager: TieringManager,
        engine: Engine,
        outcome: Outcome,
        place: Place,
        pace: Pace,
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
        """Look at the tier; false when it is over."""
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
        if self._back_s is None and None not in (
            outcome.closed_s,
            outcome.loaded_s,
            outcome.stored_s,
        ):
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
    """Return the states of a tier that is not well, as ``kvtier top`` names them."""
    states = {"no reads": stats.reads_open, "no stores": stats.stores_open, "slow": stats.is_slow}
    return {state for state, is_so in states.items() if is_so}


def _counters(stats: list[TierStats]) -> dict[str, int]:
    """Counters of host pool and tier together."""
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


def _note(outcome: Outcome, engine: Engine) -> None:
    outcome.requests = engine.requests
    outcome.compared_bytes = engine.compared_bytes
    outcome.wrong_bytes = engine.wrong_bytes
    outcome.late_retries = engine.late_retries
    outcome.revived = engine.revived
    outcome.restored = engine.restored
    outcome.wait_s = engine.longest_wait_s
    outcome.stall_in, outcome.stall_us, _ = engine.times.longest
    outcome.stall_cpu_us = engine.times.longest_cpu_us
    outcome.median_us = statistics.median(engine.times.wall_us)


def _count_lost(place: Place, keys: list[OffloadKey]) -> int:
    """Load chunks in a new engine; how many do not come back as they were stored."""
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


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment, which processes of tiers inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
