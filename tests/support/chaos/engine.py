"""An engine that plays chats in real time, and times each call of the manager."""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from kvtier_sdk import HostPool, LookupResult, OffloadKey, RequestContext
from kvtier_sdk.cli.replay import ReplayRequest
from kvtier_sdk.cli.replay.driver import ChunkContent
from kvtier_sdk.engine import TieringManager
from support.chaos.scenarios import Outcome

T = TypeVar("T")

#: A step lasts this long, unless a tier reports earlier.
STEP_S = 0.005
_MOST_ACTIVE = 16
_PATIENCE_S = 20.0


class Engine:
    def __init__(
        self,
        manager: TieringManager,
        pool: HostPool,
        reported: threading.Event,
        lookup_deadline_s: float,
        outcome: Outcome,
    ) -> None:
        self.wall_us = array("d")
        # The time at which each chunk was announced as stored. A removal deletes the entry.
        self.announced: dict[OffloadKey, float] = {}
        self.began_s = -math.inf
        self.is_destroyed = False
        self._manager = manager
        self._pool = pool
        self._reported = reported
        self._lookup_deadline_s = lookup_deadline_s
        self._outcome = outcome
        self._content = ChunkContent(pool.chunk_bytes)
        self._active: list[Iterator[None]] = []
        # For each chunk, the times of its last write to the pool and its first store in the tier.
        self._written_s: dict[OffloadKey, float] = {}
        self._stored_s: dict[OffloadKey, float] = {}
        self._step_began_s = self._handed_over_s = 0.0

    def play(
        self, workload: Iterable[ReplayRequest], per_second: float, watch: Callable[[], bool]
    ) -> None:
        arrivals = iter(workload)
        next_s = time.monotonic()
        while watch():
            now_s = time.monotonic()
            while next_s <= now_s:
                next_s += 1 / per_second
                # Like an engine, serve a limited number of requests at once.
                if len(self._active) < _MOST_ACTIVE:
                    self._active.append(self._serve(next(arrivals)))
            self._step()
        # Wait for hanging calls too. A call can outlive its job, whose slots stay pinned meanwhile.
        end_s = time.monotonic() + _PATIENCE_S
        while self._active or any(self._manager.left_over().values()):
            self._step()
            if time.monotonic() > end_s:
                break
        self._take_events()

    def _call(self, method: Callable[..., T], *arguments: object) -> T:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        result = method(*arguments)
        cpu_us = (time.thread_time_ns() - cpu_ns) / 1e3
        wall_us = (time.perf_counter_ns() - wall_ns) / 1e3
        self.wall_us.append(wall_us)
        outcome = self._outcome
        outcome.stall_cpu_us = max(outcome.stall_cpu_us, cpu_us)
        if wall_us > outcome.stall_us:
            outcome.stall_us, outcome.stall_in = wall_us, method.__name__
        return result

    def _step(self) -> None:
        self._reported.clear()
        self._active = [serving for serving in self._active if next(serving, self) is not self]
        self._call(self._manager.on_schedule_end)
        self._handed_over_s = time.monotonic()
        self._take_events()
        self._reported.wait(STEP_S)
        self._step_began_s = time.monotonic()

    def _take_events(self) -> None:
        now_s = time.monotonic()
        for event in self._manager.take_events():
            if event.tier == "tier":
                if event.removed:
                    for key in event.keys:
                        self.announced.pop(key, None)
                    continue
                self.announced.update(dict.fromkeys(event.keys, now_s))
                for key in event.keys:
                    self._outcome.restored += self._stored_s.setdefault(key, now_s) < self.began_s

    def _serve(self, request: ReplayRequest) -> Iterator[None]:
        manager, call, outcome = self._manager, self._call, self._outcome
        context = RequestContext(request.request_id)
        call(manager.on_new_request, context)
        began_s = time.monotonic()
        pending: dict[OffloadKey, list[float]] = {}
        while (hits := self._scan(request.keys, context, pending)) is None:
            yield None
            for ends_s in pending.values():
                ends_s.append(self._handed_over_s)
        outcome.wait_s = max(outcome.wait_s, time.monotonic() - began_s)
        found, rest = request.keys[:hits], request.keys[hits:]
        loads = call(manager.prepare_load, found, context)
        for key, slot in zip(found, loads.slots, strict=True):
            outcome.wrong_bytes += self._content.wrong_bytes(key, self._pool.view(slot))
            outcome.revived += self.is_destroyed and self._written_s[key] < self.began_s
            outcome.compared_bytes += self._pool.chunk_bytes
        # An engine's device copies chunks while the model runs, so a step ends here.
        yield None
        call(manager.complete_load, found, context)
        stores = call(manager.prepare_store, rest, context)
        for key, slot in zip(stores.keys_to_store, stores.slots, strict=True):
            self._content.write(key, self._pool.view(slot))
            self._written_s[key] = time.monotonic()
        yield None
        call(manager.complete_store, stores.keys_to_store, context)
        call(manager.on_request_finished, context)
        outcome.requests += 1

    def _scan(
        self,
        keys: tuple[OffloadKey, ...],
        context: RequestContext,
        pending: dict[OffloadKey, list[float]],
    ) -> int | None:
        """Look chunks up as vLLM does; return the number of hits, or ``None`` until it is known."""
        hits, is_pending = 0, False
        for key in keys:
            result = self._call(self._manager.lookup, key, context)
            if result is LookupResult.RETRY:
                # A wait begins when its second step ends: the tier may get the query only then.
                # It ends when this step begins, because the manager reads its clock after that.
                ends_s = pending.setdefault(key, [])
                until_s = self._step_began_s - self._lookup_deadline_s
                self._outcome.late_retries += len(ends_s) > 1 and ends_s[1] < until_s
            else:
                pending.pop(key, None)
            if result is LookupResult.MISS:
                break
            if result is LookupResult.HIT:
                hits += 1
            else:
                is_pending = True
        return None if is_pending else hits
