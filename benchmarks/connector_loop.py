"""Drives a manager like the scheduler's side of vLLM's OffloadingConnector, without an engine.

Each step makes the connector's calls in the connector's order:

    1. ``lookup`` for each waiting request, from the first chunk to the first miss. If all answers
       have arrived, ``prepare_load`` of the hits. Otherwise, the request waits for the next step.
    2. ``on_schedule_end``.
    3. ``prepare_store`` of the chunks that a request has computed, and ``on_request_finished`` for
       each request that has ended.
    4. After the model's run, ``complete_load`` and ``complete_store``, with sets of keys.

Only the manager's calls are measured. The model's run writes and compares the bytes in the slots.
Each ``Side`` decides whether the model also waits for the tiers.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from runner import Sample, must_be_equal

from kvtier_sdk.cli.replay import ReplayRequest
from kvtier_sdk.cli.replay.driver import ChunkContent
from kvtier_sdk.types import OffloadKey

_PERCENTILES = (50.0, 99.0, 99.9)
_FINISHED = object()


class Side(Protocol):
    hit: Any
    miss: Any
    manager: Any

    def context(self, request: ReplayRequest) -> Any: ...
    def load_slots(self, spec: Any) -> list[int]: ...
    def store_slots(self, output: Any) -> tuple[Sequence[OffloadKey], Sequence[int]]: ...
    def view(self, slot: int) -> memoryview: ...
    def step_end_arguments(self, scheduled: Sequence[str]) -> tuple[Any, ...]: ...
    def run_model(self) -> None: ...
    def close(self) -> None: ...


class Meter:
    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._samples_ns: dict[str, list[int]] = defaultdict(list)
        for _ in range(2000):
            self.call("nothing", bool)
        self._own_ns = statistics.median(self._samples_ns.pop("nothing"))

    def call(self, kind: str, function: Callable[..., Any], *args: Any) -> Any:
        clock_ns = self._clock_ns
        started_ns = clock_ns()
        result = function(*args)
        self._samples_ns[kind].append(clock_ns() - started_ns)
        return result

    def samples_us(self) -> dict[str, np.ndarray]:
        """Return each kind's samples, and all samples together, without the clock's own cost."""
        samples = {
            kind: np.maximum(np.array(samples) - self._own_ns, 0) / 1e3
            for kind, samples in self._samples_ns.items()
        }
        return {**samples, "all": np.concatenate(list(samples.values()))}


class ConnectorLoop:
    def __init__(
        self, side: Side, chunk_bytes: int, clock_ns: Callable[[], int] = time.thread_time_ns
    ) -> None:
        self._side = side
        self._manager = side.manager
        self._meter = Meter(clock_ns)
        self._call = self._meter.call
        self._content = ChunkContent(chunk_bytes)
        self._scheduled: list[str] = []
        self._work = dict.fromkeys(("lookups", "hits", "stored", "refused"), 0)
        self._chunks = 0

    def play(self, workload: Sequence[ReplayRequest], concurrency: int) -> None:
        self._chunks = sum(len(request.keys) for request in workload)
        arrivals = iter(workload)
        active: list[Iterator[None]] = []
        while True:
            while len(active) < concurrency and (request := next(arrivals, None)) is not None:
                active.append(self._serve(request))
            if not active:
                return
            for serving in active:
                next(serving)
            arguments = self._side.step_end_arguments(self._scheduled)
            self._call("on_schedule_end", self._manager.on_schedule_end, *arguments)
            self._scheduled = []
            for serving in active:
                next(serving)
            self._side.run_model()
            active = [serving for serving in active if next(serving, _FINISHED) is not _FINISHED]

    def costs(self) -> Iterator[Sample]:
        """Yield counts and CPU times per chunk. The counts do not depend on the manager."""
        for name, count in self._work.items():
            yield name, "a chunk", "", count / self._chunks
        for kind, us in self._meter.samples_us().items():
            yield kind, "CPU a chunk", "us", float(us.sum()) / self._chunks

    def percentiles(self, quantity: str) -> Iterator[Sample]:
        us = np.percentile(self._meter.samples_us()["all"], _PERCENTILES)
        for share, of_call in zip(_PERCENTILES, us, strict=True):
            yield f"p{share:g}", quantity, "us", float(of_call)

    def _serve(self, request: ReplayRequest) -> Iterator[None]:
        """Serve a request; in each step, yield after items 1, 3 and 4 of the module's list."""
        keys = request.keys
        context = self._side.context(request)
        self._call("on_new_request", self._manager.on_new_request, context)
        kind = "first scan"
        while True:
            hits, pending = self._call(kind, self._scan, keys, context)
            if not pending:
                break
            kind = "later scans"
            yield
            yield
            yield
        if hits:
            yield from self._load(keys[:hits], context)
        self._scheduled.append(request.request_id)
        yield
        yield from self._store(keys[hits:], context)
        yield
        yield
        self._call("on_request_finished", self._manager.on_request_finished, context)
        yield

    def _scan(self, keys: Sequence[OffloadKey], context: Any) -> tuple[int, bool]:
        lookup, hit, miss = self._manager.lookup, self._side.hit, self._side.miss
        hits = asked = 0
        pending = False
        for key in keys:
            asked += 1
            result = lookup(key, context)
            if result is hit:
                hits += 1
            elif result is miss:
                break
            else:
                pending = True
        self._work["lookups"] += asked
        return hits, pending

    def _load(self, keys: Sequence[OffloadKey], context: Any) -> Iterator[None]:
        spec = self._call("prepare_load", self._manager.prepare_load, keys, context)
        yield
        yield
        for key, slot in zip(keys, self._side.load_slots(spec), strict=True):
            must_be_equal(not self._content.wrong_bytes(key, self._side.view(slot)))
        self._work["hits"] += len(keys)
        self._call("complete_load", self._manager.complete_load, set(keys), context)
        yield

    def _store(self, keys: Sequence[OffloadKey], context: Any) -> Iterator[None]:
        stored: Sequence[OffloadKey] = ()
        if keys:
            output = self._call("prepare_store", self._manager.prepare_store, keys, context)
            stored, slots = self._side.store_slots(output)
        yield
        if stored:
            for key, slot in zip(stored, slots, strict=True):
                self._content.write(key, self._side.view(slot))
            self._call("complete_store", self._manager.complete_store, set(stored), context)
        self._work["stored"] += len(stored)
        self._work["refused"] += len(keys) - len(stored)
