"""Plays requests through the manager step by step, as an engine does."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice, starmap, takewhile

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.cli.replay.bystanders import check_bystanders
from kvtier_sdk.cli.replay.report import ReplayHistory, ReplayReport
from kvtier_sdk.cli.replay.sessions import session_hits
from kvtier_sdk.cli.replay.workload import ReplayRequest
from kvtier_sdk.cli.tier.maintenance import pages
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.contract import StoreMoment
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening import open_manager, open_pool
from kvtier_sdk.pool import HostPool
from kvtier_sdk.registry import load_store_policy
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.types import LookupResult, OffloadKey, RequestContext

# The maximum length of a step while a tier works, about as long as an engine's step. A step must
# end even if no tier reports, because one request may wait until another stores a chunk.
_STEP_S = 0.01
# Deadlines are long, because a replay of one request at a time waits for each job.
_PATIENT_S = 600.0
_BASE_SEED = 2026
_NAMESPACE = Namespace({"engine": "kvtier replay", "content_version": 1})


def replay(
    workload: Sequence[ReplayRequest],
    config: TieringConfig,
    *,
    concurrency: int = 1,
    evict_others: bool = False,
    on_progress: Callable[[int], None] | None = None,
    clock: Clock | None = None,
) -> ReplayReport:
    clock = clock or SystemClock()
    closed = concurrency == 1
    needed = tuple(spec.needed() for spec in config.tiers)
    tiers = tuple(map(_patient, needed)) if closed else needed
    recompute_s = config.recompute_s
    # Without ``recompute_s``, no load is too slow, because a replay computes nothing.
    limit_s = math.inf if recompute_s is None else recompute_s
    config = config.model_copy(update={"tiers": tiers, "recompute_s": limit_s})
    if not evict_others:
        check_bystanders(config.tiers, clock)
    reported = threading.Event()
    history = ReplayHistory(workload, sources=1 + len(config.tiers))
    with (
        open_pool(config) as pool,
        open_manager(
            pool,
            config,
            _NAMESPACE.for_chunks(pool.chunk_bytes),
            clock=clock,
            notify=reported.set,
            policy_now_s=lambda: history.arrived_s,
        ) as manager,
    ):
        driver = _Driver(manager, pool, config.tiers, history, clock, closed)
        started_s = clock.now_s()
        driver.play(workload, concurrency, reported, on_progress)
        elapsed_s = clock.now_s() - started_s
        return ReplayReport(
            requests=len(workload),
            chunks=sum(len(request.keys) for request in workload),
            hit_chunks=driver.hit_chunks,
            chunk_bytes=pool.chunk_bytes,
            compared_bytes=driver.compared_bytes,
            wrong_bytes=driver.wrong_bytes,
            elapsed_s=elapsed_s,
            tiers=manager.stats,
            left_over=manager.left_over(),
            history=history,
            sessions=session_hits(workload, map(sum, zip(*history.hits, strict=True))),
            recompute_s=recompute_s,
        )


def _patient(spec: TierSpec) -> TierSpec:
    """Return ``spec`` with long deadlines in place of unset ones."""
    names = {"lookup_deadline_s", "load_deadline_s", "store_deadline_s"}
    patience = dict.fromkeys(names - spec.runner.model_fields_set, _PATIENT_S)
    return dataclasses.replace(spec, runner=spec.runner.model_copy(update=patience))


@dataclasses.dataclass(eq=False)
class _Driver:
    """Plays requests. Each request is a generator that yields at the end of each step."""

    _manager: TieringManager
    _pool: HostPool
    _specs: Sequence[TierSpec]
    _history: ReplayHistory
    _clock: Clock
    _closed: bool
    hit_chunks: int = 0
    compared_bytes: int = 0
    wrong_bytes: int = 0

    def __post_init__(self) -> None:
        chunk_bytes = self._pool.chunk_bytes
        self._content = ChunkContent(chunk_bytes)
        # Limit the chunks of a step, so that they fit into the pool and into each tier's queue.
        options = [spec.runner for spec in self._specs]
        limits = [of.max_queue_bytes // chunk_bytes for of in options]
        moments = [load_store_policy(of.store_policy).moment for of in options]
        self._spills = StoreMoment.EVICTED in moments
        if self._spills:
            limits.append(self._manager.headroom_slots)
        self._window = max(1, min([self._pool.slots // 2, *limits]))

    def play(
        self,
        workload: Sequence[ReplayRequest],
        concurrency: int,
        reported: threading.Event,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        """Play all requests, ``concurrency`` at a time, and let the last stores finish."""
        arriving = starmap(self._serve, enumerate(workload))
        active: list[Iterator[bool]] = []
        done = 0
        while True:
            active += islice(arriving, concurrency - len(active))
            if not active and not self._manager.has_pending_work():
                return
            # Clear the event first, so that a later report ends the wait below.
            reported.clear()
            moved = False
            for serving in list(active):
                progressed = next(serving, None)
                if progressed is None:
                    active.remove(serving)
                    done += 1
                    if on_progress is not None:
                        on_progress(done)
                moved = moved or progressed is not False
            self._manager.on_schedule_end()
            # In a closed loop (one request at a time), a report alone does not end the wait. A step
            # after every report would repeat lookups that an engine does not repeat.
            while not moved and reported.wait(_STEP_S) and self._closed:
                reported.clear()
                moved = not self._manager.has_pending_work()

    def _serve(self, number: int, request: ReplayRequest) -> Iterator[bool]:
        """Play a request. At the end of each step, yield true if the step made progress."""
        self._history.arrived_s = request.arrived_s
        context = request.context
        self._manager.on_new_request(context)
        hits = 0
        for window in self._windows(request.keys):
            started_s = self._clock.now_s()
            found = yield from self._find(window, context)
            self._history.wait_s[number] += self._clock.now_s() - started_s
            sources = self._load(window[:found], context)
            self._history.note_hits(number, hits, sources)
            if self._closed and self._spills:
                yield from self._settle()
            hits += found
            if found < len(window):
                break
        self.hit_chunks += hits
        for window in self._windows(request.keys[hits:]):
            yield from self._store(window, context)
        self._manager.on_request_finished(context, stop=request.stop)

    def _windows(self, keys: Sequence[OffloadKey]) -> Iterator[Sequence[OffloadKey]]:
        return pages(keys, self._window if self._closed else max(1, len(keys)))

    def _find(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> Generator[bool, None, int]:
        """Look up the keys in each step until no key is pending; count the leading hits."""
        while True:
            results = (self._manager.lookup(key, context) for key in keys)
            leading = list(takewhile(lambda result: result is not LookupResult.MISS, results))
            if all(result is LookupResult.HIT for result in leading):
                return len(leading)
            yield False

    def _load(self, keys: Sequence[OffloadKey], context: RequestContext) -> Sequence[int]:
        """Load chunks and compare their content; return each chunk's source."""
        if not keys:
            return ()
        spec = self._manager.prepare_load(keys, context)
        for key, slot in zip(keys, spec.slots, strict=True):
            self.wrong_bytes += self._content.wrong_bytes(key, self._pool.view(slot))
            self.compared_bytes += self._pool.chunk_bytes
        self._manager.complete_load(keys, context)
        return spec.sources

    def _store(self, keys: Sequence[OffloadKey], context: RequestContext) -> Iterator[bool]:
        while True:
            output = self._manager.prepare_store(keys, context)
            for key, slot in zip(output.keys_to_store, output.slots, strict=True):
                self._content.write(key, self._pool.view(slot))
            self._manager.complete_store(output.keys_to_store, context)
            if not self._closed:
                yield True
                return
            yield from self._settle()
            if not output.rejected_keys:
                return
            keys = output.rejected_keys
            # End the step, because chunks found in a step cannot be evicted before the step ends.
            yield True

    def _settle(self) -> Iterator[bool]:
        if self._spills:
            # End the step, because the manager stores and evicts chunks at the end of a step.
            yield True
        while self._manager.has_pending_work():
            yield False


class ChunkContent:
    """Computes chunks from keys. A wrong or shifted chunk has almost no word in its right place."""

    def __init__(self, chunk_bytes: int) -> None:
        words = -(-chunk_bytes // 8)
        rng = np.random.default_rng(_BASE_SEED)
        self._base = rng.integers(0, 2**64, size=words, dtype=np.uint64)
        self._scratch = np.empty(words, np.uint64)
        self._bytes = self._scratch.view(np.uint8)[:chunk_bytes]

    def write(self, key: OffloadKey, view: memoryview) -> None:
        np.frombuffer(view, np.uint8)[:] = self._expected(key)

    def wrong_bytes(self, key: OffloadKey, view: memoryview) -> int:
        return int(np.count_nonzero(np.frombuffer(view, np.uint8) != self._expected(key)))

    def _expected(self, key: OffloadKey) -> npt.NDArray[np.uint8]:
        np.add(self._base, np.uint64(xxh3_64_intdigest(key)), out=self._scratch)
        return self._bytes
