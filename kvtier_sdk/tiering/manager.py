"""The manager: primary and secondary tiers behind the verbs of an engine's scheduler."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvtier_sdk.clock import Clock
from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.events import PRIMARY, OffloadingEvent
from kvtier_sdk.jobs import (
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    Operation,
    Verdict,
    failure_counts,
)
from kvtier_sdk.metrics import PoolUsage, TierStats
from kvtier_sdk.pool import HostPool
from kvtier_sdk.primary import PrimaryTier, Slot, SlotState
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.tier_spec import TierSpec
from kvtier_sdk.tiering.probes import Probe, ProbeBook
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.requests import RequestState
from kvtier_sdk.tiering.tier_port import TierPort
from kvtier_sdk.types import Locality, LookupResult, Medium, OffloadKey, RequestContext

_log = logging.getLogger("kvtier.manager")

# Looked up once: this is the engine's thread.
_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_HIT_PENDING, _RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
_NOT_FOUND = Verdict.NOT_FOUND
_READY, _WRITING, _LOADING = SlotState.READY, SlotState.WRITING, SlotState.LOADING

#: How long after its deadline a job's conclusion may arrive before the manager does without.
_CONCLUSION_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Where the chunks of a load lie.

    Attributes:
        slots: a slot index a key, in the order of the keys.
        sources: where each chunk came from for this request: the index of the tier that it was
            promoted from, -1 for one that was in the primary tier.
    """

    slots: list[int]
    sources: list[int]


@dataclass(frozen=True, slots=True)
class PrepareStoreOutput:
    """What is to be stored, and where.

    Attributes:
        keys_to_store: the keys that are new and got a slot, in the order given.
        slots: a slot index for each of them.
        evicted_keys: chunks that left the primary tier to make room.
        rejected_keys: new keys for which there was no room.
    """

    keys_to_store: list[OffloadKey]
    slots: list[int]
    evicted_keys: list[OffloadKey]
    rejected_keys: list[OffloadKey]


class TieringManager:
    """Decides which chunk is where; never blocks and never raises a storage error.

    All methods are called on one thread, the engine's scheduler. The order for a request is
    ``on_new_request``, ``lookup`` of its chunks from the first to the first ``MISS``, each step
    anew until none is pending, ``prepare_load``, ``complete_load``, ``prepare_store``,
    ``complete_store``, ``on_request_finished``; completions may arrive after the last. Each step
    ends with ``on_schedule_end``.

    Attributes:
        stats: of the primary tier, then of each secondary tier in order.

    Args:
        pool: the slots' memory; the caller closes it after :meth:`shutdown`.
        policy: chooses what leaves the primary tier.
        clock: time.
        store_reserve: share of the slots that promotions leave to stores, 0.0 to 1.0.
        events: whether to collect events for :meth:`take_events`; somebody must take them.
    """

    def __init__(
        self,
        pool: HostPool,
        *,
        policy: EvictionPolicy,
        clock: Clock,
        store_reserve: float = 0.1,
        events: bool = False,
    ) -> None:
        self._clock = clock
        self._policy = policy
        self._pool = pool
        self._chunk_bytes = pool.chunk_bytes
        self._primary = PrimaryTier(pool.slots, policy, self._note_evicted)
        self._primary_stats = TierStats(PRIMARY, "primary")
        self._ports: list[TierPort] = []
        self._all_tiers = 0
        self._lookup_deadline_s = 0.0
        self._promotions = Promotions(self._primary, limit=int(pool.slots * (1 - store_reserve)))
        self._requests: dict[str, RequestState] = {}
        self._probes = ProbeBook()
        self._job_ids = itertools.count(1)
        self._touched: dict[OffloadKey, None] = {}
        self._evicted: list[OffloadKey] = []
        self._events: list[OffloadingEvent] | None = [] if events else None
        self._collected = False
        self._now_s = clock.now_s()

    def add_tier(self, spec: TierSpec, runner: TierRunner) -> None:
        """Open a secondary tier and put it behind those that are there. Waits for it.

        Args:
            spec: the tier.
            runner: will run it; from now on it is the manager's.

        Raises:
            ConfigError: a tier of that name is there, or a setting cannot work.
            TierError: the store cannot be reached.
        """
        if any(port.spec.name == spec.name for port in self._ports):
            raise ConfigError(f"two tiers are named {spec.name!r}; give one of them another name")
        runner.start()
        port = TierPort(len(self._ports), spec, runner, self._chunk_bytes)
        self._ports.append(port)
        self._all_tiers |= port.bit
        self._lookup_deadline_s = max(self._lookup_deadline_s, spec.runner.lookup_deadline_s)

    @property
    def stats(self) -> list[TierStats]:
        """Counters of the primary tier, then of each secondary tier in order; live, not copies."""
        return [self._primary_stats, *(port.stats for port in self._ports)]

    def usage(self) -> PoolUsage:
        """How the host pool is used right now. Walks over all slots: not for every step."""
        states = Counter(slot.state for slot in self._primary.slots)
        return PoolUsage(
            slots=len(self._primary.slots),
            free=states[SlotState.FREE],
            ready=states[_READY],
            writing=states[_WRITING],
            loading=states[_LOADING],
            quarantined=states[SlotState.QUARANTINED],
            pinned=sum(1 for slot in self._primary.slots if slot.pins),
        )

    def on_new_request(self, request: RequestContext) -> None:
        """A request has arrived.

        Args:
            request: its context; its id must not be that of a request that is alive.

        Raises:
            KVTierError: a request of that id is alive.
        """
        if request.request_id in self._requests:
            raise KVTierError(f"request {request.request_id!r} is alive already")
        self._requests[request.request_id] = RequestState(request)

    def lookup(self, key: OffloadKey, request: RequestContext) -> LookupResult:
        """Say whether a chunk can be had.

        Args:
            key: the chunk.
            request: who asks; :meth:`on_new_request` has been called for it.

        Returns:
            ``HIT``: readable now; ``prepare_load`` of it in this step succeeds. ``HIT_PENDING``:
            on its way into the primary tier, ask again next step. ``RETRY``: a tier is still
            answering, ask again next step; bounded by the lookup deadline. ``MISS``: recompute.

        Raises:
            KVTierError: the request is unknown.
        """
        if not self._collected:
            self._collect()
        state = self._requests.get(request.request_id) or self._state(request)
        if self._policy.uses_prefix:
            state.lineage.note(key)
        slot = self._primary.by_key.get(key)
        if slot is not None:
            if slot.state is _READY:
                slot.hit_step = self._primary.step
                self._touched[key] = None
                return _HIT
            if slot.state is _LOADING and key not in state.pending:
                self._promotions.join(slot, state)
            return _HIT_PENDING
        probe = state.probes.get(key)
        if probe is None:
            return self._ask(key, state)
        if probe.hits:
            return self._promote(probe, state)
        if probe.waiting:
            if self._now_s <= probe.deadline_s:
                return _RETRY
            self._probes.give_up(probe)
        return _MISS

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], request: RequestContext
    ) -> tuple[int, bool]:
        """Look a prefix up from its start to the first miss.

        Args:
            keys: chunks of one prefix, in order.
            request: who asks.

        Returns:
            How many chunks from the start are there or on their way, and whether an answer or a
            chunk is still awaited: if so, ask again next step.

        Raises:
            KVTierError: the request is unknown.
        """
        hits = 0
        pending = False
        for key in keys:
            result = self.lookup(key, request)
            if result is _MISS:
                break
            if result is not _HIT:
                pending = True
            # Behind a chunk that a tier is still asked for, nothing is known to be a prefix; the
            # scan goes on so that the whole of it is asked in one step.
            if result is not _RETRY:
                hits += 1
        return hits, pending

    def prepare_load(self, keys: Sequence[OffloadKey], request: RequestContext) -> LoadSpec:
        """Pin chunks for a copy to the device.

        Args:
            keys: chunks that :meth:`lookup` called ``HIT`` in this step.
            request: for whom; holds the pins until :meth:`complete_load`.

        Returns:
            Where they lie.

        Raises:
            KVTierError: a chunk is not readable, or the request is unknown; nothing is pinned.
        """
        state = self._state(request)
        by_key = self._primary.by_key
        slots = [by_key.get(key) for key in keys]
        for key, slot in zip(keys, slots, strict=True):
            if slot is None or slot.state is not _READY:
                raise KVTierError(f"prepare_load of chunk {key.hex()}, which is not readable")
        sources = []
        for key, slot in zip(keys, slots, strict=True):
            assert slot is not None
            # What was promoted for this request came from its tier, also if it waited since.
            source = slot.source if self._promotions.let_go(key, state) else -1
            stats = self._primary_stats if source < 0 else self._ports[source].stats
            stats.hit_chunks += 1
            sources.append(source)
            slot.pins += 1
            state.loads[key] = state.loads.get(key, 0) + 1
            self._touched[key] = None
        return LoadSpec([slot.index for slot in slots if slot is not None], sources)

    def complete_load(self, keys: Collection[OffloadKey], request: RequestContext) -> None:
        """The copies to the device have ended, well or not.

        Args:
            keys: chunks that were prepared for this request; others are ignored.
            request: for whom.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        loaded = 0
        for key in keys:
            copies = state.loads.pop(key, 0)
            if copies:
                loaded += 1
                self._primary.by_key[key].pins -= 1
            if copies > 1:
                state.loads[key] = copies - 1
        self._primary_stats.loaded_chunks += loaded
        self._primary_stats.loaded_bytes += loaded * self._chunk_bytes
        self._end_if_over(state)

    def touch(self, keys: Collection[OffloadKey], request: RequestContext) -> None:
        """Count chunks as used. Not needed after ``lookup`` and ``prepare_load``.

        Args:
            keys: chunks, in prefix order.
            request: who used them.
        """
        self._touched.update(dict.fromkeys(keys))

    def prepare_store(
        self, keys: Collection[OffloadKey], request: RequestContext
    ) -> PrepareStoreOutput:
        """Take slots for chunks that the device will write.

        Args:
            keys: chunks, in prefix order; those that are there already are left out.
            request: for whom; holds the slots until :meth:`complete_store`.

        Returns:
            What to store and where. When room runs out, the first keys get it.

        Raises:
            KVTierError: the request is unknown.
        """
        state = self._state(request)
        by_key = self._primary.by_key
        if self._policy.uses_prefix:
            for key in keys:
                state.lineage.note(key)
        new = [key for key in dict.fromkeys(keys) if key not in by_key]
        if len(new) > self._primary.free_slots:
            self._collect()
        self._evicted.clear()
        slots = self._primary.take(len(new))
        stored = new[: len(slots)]
        for key, slot in zip(stored, slots, strict=True):
            self._primary.assign(slot, key, _WRITING)
            if self._policy.uses_prefix:
                slot.parent, slot.position = state.lineage.note(key)
            state.writes[key] = slot
        rejected = new[len(slots) :]
        if rejected:
            self._primary_stats.dropped["store.primary_full"] += len(rejected)
        return PrepareStoreOutput(
            stored, [slot.index for slot in slots], list(self._evicted), rejected
        )

    def complete_store(
        self, keys: Collection[OffloadKey], request: RequestContext, success: bool = True
    ) -> None:
        """The device has written chunks: they become readable and go on to the tiers.

        Args:
            keys: chunks that were prepared for this request; others are ignored.
            request: for whom.
            success: false if the copies failed: the chunks are forgotten.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if isinstance(keys, set | frozenset):
            keys = [key for key in state.writes if key in keys]
        written = [(key, slot) for key in keys if (slot := state.writes.pop(key, None))]
        if success:
            # The last first: a chunk without those before it is worth nothing, so the start of
            # the prefix shall be the last to go.
            for _, slot in reversed(written):
                self._primary.publish(slot, state.context)
            self._primary_stats.stored_chunks += len(written)
            self._primary_stats.stored_bytes += len(written) * self._chunk_bytes
            self._cascade(written, state.context)
            if self._events is not None and written:
                self._events.append(self._primary_event([key for key, _ in written], removed=False))
        else:
            for _, slot in written:
                self._primary.forget(slot)
                self._primary.give_back(slot)
        self._end_if_over(state)

    def on_request_finished(self, request: RequestContext) -> None:
        """A request is done or was aborted: no more lookups or prepares for it follow.

        Its pins go, but for those of copies that have not completed; what was stored for it is
        handed to the tiers at once, since no step may follow.

        Args:
            request: which; an unknown one is ignored.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        state.finished = True
        self._promotions.abandon(state)
        self._end_if_over(state)
        self._flush()

    def on_schedule_end(self, preempted_request_ids: Collection[str] = ()) -> None:
        """A step ends: collect results, note uses, hand over what was gathered.

        Args:
            preempted_request_ids: requests that lost their device blocks and will be looked up
                again: what tiers answered to them before is forgotten.
        """
        if not self._collected:
            self._collect()
        for request_id in preempted_request_ids:
            if request_id in self._requests:
                self._requests[request_id].probes.clear()
        if self._touched:
            # Reversed, so that the start of a prefix is the most recent, as in complete_store.
            touched = list(reversed(self._touched))
            self._touched = {}
            for key in touched:
                self._primary.access(key)
            for port in self._ports:
                port.touch(touched)
        self._flush()
        for port in self._ports:
            self._give_up_overdue(port)
        self._primary.step += 1
        self._collected = False

    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping although no request is scheduled."""
        if not self._collected:
            self._collect()
        return any(port.jobs or port.waiting for port in self._ports)

    def take_events(self) -> list[OffloadingEvent]:
        """Take the events since the last call, oldest first."""
        taken = self._events or []
        if self._events is not None:
            self._events = []
        return taken

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let stores that run finish, close the tiers, and forget everything.

        Args:
            timeout_s: for each tier, for draining and for closing.
        """
        self._flush()
        for port in self._ports:
            port.runner.close(timeout_s)
        self._collect()
        self._requests.clear()

    def _state(self, request: RequestContext) -> RequestState:
        try:
            return self._requests[request.request_id]
        except KeyError:
            raise KVTierError(
                f"request {request.request_id!r} is unknown: call on_new_request first, and "
                "nothing but completions after on_request_finished"
            ) from None

    def _end_if_over(self, state: RequestState) -> None:
        if state.over:
            self._requests.pop(state.context.request_id, None)

    # --- asking and promoting -----------------------------------------------------------------

    def _ask(self, key: OffloadKey, state: RequestState) -> LookupResult:
        """Put the question to all tiers, or join one that is open."""
        if not self._ports:
            return _MISS
        probe = self._probes.find(key)
        if probe is None:
            deadline_s = self._now_s + self._lookup_deadline_s
            probe = self._probes.open(key, self._all_tiers, deadline_s)
            for port in self._ports:
                port.lookup(key, state.context)
        state.probes[key] = probe
        return self._promote(probe, state) if probe.hits else _RETRY

    def _promote(self, probe: Probe, state: RequestState) -> LookupResult:
        port = self._ports[probe.best_hit]
        return _HIT_PENDING if self._promotions.start(probe, port, state) else _MISS

    # --- handing over -------------------------------------------------------------------------

    def _cascade(self, written: Sequence[tuple[OffloadKey, Slot]], request: RequestContext) -> None:
        """Write newly stored chunks through to every tier; each holds a pin until it is done."""
        if not written:
            return
        keys = [key for key, _ in written]
        indices = [slot.index for _, slot in written]
        for port in self._ports:
            taken = port.store(keys, indices, request)
            for _, slot in written[:taken]:
                slot.pins += 1

    def _flush(self) -> None:
        now_s = self._clock.now_s()
        for port in self._ports:
            for job in port.flush(now_s, self._job_ids.__next__):
                if job.operation is Operation.LOOKUP:
                    self._probes.handed_over(job)

    # --- taking back --------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take what the tiers have reported since the last time."""
        self._collected = True
        self._now_s = self._clock.now_s()
        for port in self._ports:
            for report in port.runner.poll():
                if isinstance(report, JobResult):
                    self._conclude(port, report)
                elif isinstance(report, IoEnded):
                    self._release(port, report.job_id)
                elif isinstance(report, ChunksRemoved):
                    self._note_removed(port, report)

    def _give_up_overdue(self, port: TierPort) -> None:
        """Conclude jobs in the place of a runner that does not: its loop must be stuck."""
        for job in port.jobs.overdue(self._now_s, _CONCLUSION_GRACE_S):
            error = f"{port.spec.name} {job.operation.value}: no answer; the tier blocks its loop"
            _log.error("%s", error)
            verdicts = [Verdict.TIMEOUT] * len(job.keys)
            self._conclude(port, JobResult(job.job_id, verdicts, error=error, released=False))

    def _conclude(self, port: TierPort, result: JobResult) -> None:
        job = port.jobs.conclude(result.job_id)
        if job is not None:
            port.settled(job)
            self._count(port, job, result)
            if job.operation is Operation.LOOKUP:
                self._probes.answered(job, port.bit, result.verdicts)
            elif job.operation is Operation.LOAD:
                landed = self._promotions.concluded(job, result.verdicts, self._policy.uses_prefix)
                if self._events is not None and landed:
                    self._events.append(self._primary_event(landed, removed=False))
            elif job.operation is Operation.STORE and self._events is not None:
                stored = [
                    key
                    for key, verdict in zip(job.keys, result.verdicts, strict=True)
                    if verdict is Verdict.OK
                ]
                if stored:
                    self._events.append(port.event(stored, removed=False))
        if result.released:
            self._release(port, result.job_id)

    def _release(self, port: TierPort, job_id: int) -> None:
        """The tier touches the job's slots no more."""
        job = port.jobs.release(job_id)
        if job is None:
            return
        if job.operation is Operation.STORE:
            slots = self._primary.slots
            for index in job.slots:
                slots[index].pins -= 1
        elif job.operation is Operation.LOAD:
            self._promotions.released(job)

    def _count(self, port: TierPort, job: Job, result: JobResult) -> None:
        stats = port.stats
        succeeded = result.verdicts.count(Verdict.OK)
        if job.operation is Operation.STORE:
            stats.stored_chunks += succeeded
            stats.stored_bytes += result.moved_bytes
            stats.store_s += result.duration_s
        elif job.operation is Operation.LOAD:
            stats.loaded_chunks += succeeded
            stats.loaded_bytes += result.moved_bytes
            stats.load_s += result.duration_s
        # That a chunk is not there is an answer to a lookup, not a failure of it.
        answered = result.verdicts.count(_NOT_FOUND) if job.operation is Operation.LOOKUP else 0
        if succeeded + answered < len(job.keys):
            for reason, count in failure_counts(result.verdicts).items():
                if not (answered and reason == _NOT_FOUND.value):
                    stats.failures[f"{job.operation.value}.{reason}"] += count
        if result.error is not None:
            stats.note_error(result.error)

    def _note_removed(self, port: TierPort, report: ChunksRemoved) -> None:
        port.stats.evicted_chunks += len(report.keys)
        if self._events is not None:
            self._events.append(port.event(report.keys, removed=True))

    def _note_evicted(self, keys: Sequence[OffloadKey]) -> None:
        self._evicted.extend(keys)
        self._primary_stats.evicted_chunks += len(keys)
        if self._events is not None:
            self._events.append(self._primary_event(keys, removed=True))

    def _primary_event(self, keys: Sequence[OffloadKey], removed: bool) -> OffloadingEvent:
        return OffloadingEvent(keys, PRIMARY, Medium.CPU, Locality.LOCAL, removed)
