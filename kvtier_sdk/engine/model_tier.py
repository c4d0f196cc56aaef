"""The tier of one model, and the thread that uses the tier."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.events import Announce
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening import BlockingTier, open_tier
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.runner.jobs import Job, Operation, Verdict
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.types import OffloadKey, RequestContext

#: Maximum interval between polls while jobs run. It is short: only a poll ends overdue jobs.
_OVERDUE_LOOK_S = 0.25
#: The lookup deadline can be long, because the engine looks up chunks before it needs them.
_LOOKUP_DEADLINE_S = 1.0
#: The maximum time that a model's first tasks wait for the tier to open.
_OPENING_S = 5.0

_log = logging.getLogger("kvtier.engine")


@dataclass(eq=False, slots=True)
class Work:
    """The part of an engine's task that concerns one model.

    Attributes:
        operation: a lookup, a load, a store or a deletion.
        request: the request that causes the work.
        done: called once, after all I/O on the slots has ended, with one verdict per key and the
            number of moved bytes. The model's thread calls it, or ``submit`` if the thread ended.
        keys: the chunks.
        slots: the chunks' slots; empty for a lookup and a deletion.
    """

    operation: Operation
    request: RequestContext
    done: Callable[[Sequence[Verdict], int], None]
    keys: list[OffloadKey] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class ModelTier(TierListener):
    """A tier for the chunks of one model and layout, and the thread that uses the tier.

    Any thread may call the methods.

    Args:
        spec: the tier's specification, with a unique name.
        memory: the slots; each slot's payload is one chunk.
        namespace: the namespace of the model's chunks.
        engine: the name of the engine that owns the memory.
        clock: the source of time.
        shutdown_timeout_s: seconds allowed for draining the tier, and again for closing it.
        announce: as for :func:`open_tier`.
        changed: called in the model's thread with chunks and a boolean: true if the chunks have
            left the tier, false if the tier has stored them. This call precedes the call of
            ``done`` for the work that caused the change.

    Raises:
        ConfigError: the tier cannot store chunks of this length, or a setting cannot work.
    """

    def __init__(
        self,
        spec: TierSpec,
        memory: PoolMemory,
        namespace: Namespace,
        *,
        engine: str,
        clock: Clock,
        shutdown_timeout_s: float,
        announce: Announce | None = None,
        changed: Callable[[Sequence[OffloadKey], bool], None] | None = None,
    ) -> None:
        spec = _fitted(spec, memory)
        self.name = spec.name
        self._clock = clock
        self._changed = changed or (lambda keys, removed: None)
        self._inbox: deque[Work] = deque()
        self._under_way: set[Work] = set()  # unfinished work that the client has received
        self._found: list[OffloadKey] = []
        self._wake = threading.Event()
        self._is_stale = False
        self._closing = False
        self._has_ended = False
        self._opened = ExitStack()
        self._client = self._opened.enter_context(
            open_tier(
                spec.in_background(),
                memory,
                namespace,
                self,
                clock=clock,
                events=changed is not None,
                notify=self._wake.set,
                announce=announce,
                shutdown_timeout_s=shutdown_timeout_s,
                engine=engine,
            )
        )
        # Queued stores occupy no slots of a pool, so the tier's speed need not limit them.
        self._client.pace.store_bytes = math.inf
        self._thread = threading.Thread(target=self._run, name=f"kvtier-{spec.name}", daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Queue ``work``. ``done`` runs by the job's deadline, or later if the I/O takes longer."""
        self._inbox.append(work)
        self._wake.set()
        if self._has_ended:
            self._refuse_inbox()

    def purge(self) -> None:
        """Delete the model's chunks. Until the deletion has succeeded, every chunk is a miss."""
        self._is_stale = True
        self._wake.set()

    def stats_now(self) -> TierStats:
        """Return a copy of the tier's counters with the tier's current state."""
        return self._client.stats_now()

    @property
    def is_running(self) -> bool:
        """True until the thread ends, because of :meth:`close` or a bug."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Tell the thread to finish all stores and close the tier; :meth:`join` waits for this."""
        self._closing = True
        self._wake.set()

    def join(self) -> None:
        """Wait until all work is done and the thread has ended."""
        self._thread.join()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._opened:
                self._await_opening()
                while not self._closing:
                    self._step()
                    self._wake.wait(_OVERDUE_LOOK_S if self._client.has_work else None)
                    self._wake.clear()
                self._step()
        except Exception:
            # Only a bug leads here. ``finally`` finishes all work, because the engine is waiting.
            _log.exception("tier %s: its thread has ended; all that follows is a miss", self.name)
        finally:
            self._has_ended = True
            self._refuse_inbox()
            for work in list(self._under_way):
                self._finish(work, [], 0)

    def _refuse_inbox(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                self._finish(self._inbox.popleft(), [], 0)

    def _await_opening(self) -> None:
        """Wait until the tier has opened or failed to open, because lookups miss until then."""
        stats, options = self._client.stats, self._client.spec.runner
        BlockingTier(self._client, self._wake, self._clock).wait(
            lambda: bool(stats.is_open or stats.open_failures or self._closing),
            min(options.open_deadline_s, _OPENING_S),
        )

    def _step(self) -> None:
        client = self._client
        if self._is_stale:
            self._is_stale = False
            client.purge()
        while self._inbox:
            self._collect(self._inbox.popleft())
        if self._found:
            # Touch chunks found by lookups, so that the tier evicts other chunks first.
            client.touch(self._found)
            self._found = []
        client.flush()
        client.poll()
        self._tell_changes()

    def _tell_changes(self) -> None:
        for event in self._client.take_events():
            self._changed(event.keys, event.removed)

    def _collect(self, work: Work) -> None:
        client, operation = self._client, work.operation
        self._under_way.add(work)
        job: Job | None = None
        if operation is Operation.LOAD:
            job = client.load(work.keys, work.slots, work.request, tag=work)
        elif operation is Operation.STORE:
            job = client.store(work.keys, work.slots, work.request, tag=work)
        elif operation is Operation.DELETE:
            job = client.delete(work.keys, work.request, tag=work)
        elif client.takes_reads:
            job = client.lookup(work.keys, work.request, tag=work)
        else:
            client.drop_lookups(len(work.keys))
        if job is None:
            self._finish(work, [], 0)

    def _finish(self, work: Work, verdicts: Sequence[Verdict], moved_bytes: int) -> None:
        """Call ``done``. Keys without a verdict count as unavailable."""
        self._under_way.discard(work)
        dropped = [Verdict.UNAVAILABLE] * (len(work.keys) - len(verdicts))
        work.done([*verdicts, *dropped], moved_bytes)

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._found += [k for k, v in zip(job.keys, verdicts, strict=True) if v is Verdict.OK]
        if self._found:
            self._wake.set()  # touch the chunks in the next step, before the engine loads them
        self._finish(job.tag, verdicts, 0)

    def deleted(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._tell_changes()
        gone = [k for k, v in zip(job.keys, verdicts, strict=True) if v is Verdict.OK]
        if gone:
            self._changed(gone, True)
        self._finish(job.tag, verdicts, 0)

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        tier.stats.hit_chunks += verdicts.count(Verdict.OK)

    def released(self, tier: TierClient, job: Job) -> None:
        self._tell_changes()
        result = job.result
        if result is not None and job.operation in (Operation.LOAD, Operation.STORE):
            self._finish(job.tag, result.verdicts, result.moved_bytes)


def _fitted(spec: TierSpec, memory: PoolMemory) -> TierSpec:
    """Replace defaults that do not suit an engine; keep options that the configuration sets."""
    better = {
        "lookup_deadline_s": _LOOKUP_DEADLINE_S,
        # Queued chunks stay in the engine's memory, whose size already limits the queue.
        "max_queue_bytes": memory.region.size_bytes,
    }
    given = spec.runner.model_fields_set
    update = {name: value for name, value in better.items() if name not in given}
    return replace(spec, runner=spec.runner.model_copy(update=update))
