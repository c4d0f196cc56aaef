"""The manager: primary and secondary tiers behind the verbs of an engine's scheduler."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Collection, Sequence

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.events import PRIMARY, OffloadingEvent
from kvtier_sdk.metrics import PoolUsage, TierStats
from kvtier_sdk.registry import load_store_policy
from kvtier_sdk.runner import PoolMemory, TierRunner
from kvtier_sdk.tiering.cascade import Cascade
from kvtier_sdk.tiering.lookups import LookupTable, PendingLookup
from kvtier_sdk.tiering.outputs import LoadSpec, MissReason, PrepareStoreOutput, ResetScope
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.reports import EventLog, ReportDesk
from kvtier_sdk.tiering.requests import RequestState
from kvtier_sdk.tiering.slots import PrimaryTier, Slot, SlotState
from kvtier_sdk.tiering.tier_port import TierPort
from kvtier_sdk.types import LookupResult, OffloadKey, RequestContext

# Looked up once: this is the engine's thread.
_HIT, _MISS = LookupResult.HIT, LookupResult.MISS
_HIT_PENDING, _RETRY = LookupResult.HIT_PENDING, LookupResult.RETRY
_READY, _WRITING, _LOADING = SlotState.READY, SlotState.WRITING, SlotState.LOADING


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
        store_reserve: share of the slots that promotions leave to stores, 0.0 to 1.0; the same
            share is kept free where a tier is given what is evicted.
        events: whether to collect events for :meth:`take_events`; somebody must take them.
        one_copy: whether a request that wants a chunk which is being copied to the device for
            another is told to wait, so that one copy serves both. An engine that sees to this
            itself leaves it off.
        recompute_s: how long the engine takes to recompute a chunk; with it, chunks that a tier
            brings more slowly than that are a ``MISS``.
    """

    def __init__(
        self,
        pool: PoolMemory,
        *,
        policy: EvictionPolicy,
        clock: Clock,
        store_reserve: float = 0.1,
        events: bool = False,
        one_copy: bool = False,
        recompute_s: float | None = None,
    ) -> None:
        self._clock = clock
        self._policy = policy
        self._pool = pool
        self._one_copy = one_copy
        self._recompute_s = recompute_s
        self._events = EventLog(wanted=events)
        self._primary = PrimaryTier(pool.slots, policy, self._note_evicted)
        self._primary_stats = TierStats(PRIMARY, "primary")
        self._ports: list[TierPort] = []
        self._all_tiers = 0
        self._lookup_deadline_s = 0.0
        self._questions = LookupTable()
        reserve = round(pool.slots * store_reserve)
        self._promotions = Promotions(self._primary, limit=pool.slots - reserve)
        self._cascade = Cascade(self._primary, headroom_slots=reserve)
        self._desk = ReportDesk(
            self._primary, self._questions, self._promotions, self._cascade, self._events
        )
        self._requests: dict[str, RequestState] = {}
        self._job_ids = itertools.count(1)
        self._touched: dict[OffloadKey, None] = {}
        # What makes room for a store that is being prepared.
        self._evicted: list[OffloadKey] | None = None
        # Slots that copies of before a reset may still touch.
        self._stale_copies: list[Slot] = []
        self._collected = False
        self._now_s = clock.now_s()

    def add_tier(self, spec: TierSpec, runner: TierRunner) -> None:
        """Open a secondary tier and put it behind those that are there. Waits for it.

        Args:
            spec: the tier.
            runner: will run it; from now on it is the manager's.

        Raises:
            ConfigError: a tier of that name is there, or a setting cannot work.
            BackendError: the tier's store policy cannot be found or loaded.
            TierError: the store cannot be reached.
        """
        if any(port.spec.name == spec.name for port in self._ports):
            raise ConfigError(f"two tiers are named {spec.name!r}; give one of them another name")
        store_policy = load_store_policy(spec.runner.store_policy)
        runner.start()
        pool = self._pool
        port = TierPort(len(self._ports), spec, runner, store_policy, pool.slots, pool.chunk_bytes)
        self._ports.append(port)
        self._all_tiers |= port.bit
        self._cascade.add(port)
        self._lookup_deadline_s = max(self._lookup_deadline_s, spec.runner.lookup_deadline_s)

    @property
    def headroom_slots(self) -> int:
        """Slots that are kept free where a tier is given what is evicted."""
        return self._cascade.headroom_slots

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
            pinned=sum(1 for s in self._primary.slots if s.pins and s.state is _READY),
        )

    def left_over(self) -> dict[str, int]:
        """What is held right now; with no request alive and no work pending, all are 0.

        Returns:
            Number of pins, of slots that are neither free nor readable, of requests, and of jobs.
        """
        usage = self.usage()
        return {
            "pins": self._primary.pins,
            "slots": usage.slots - usage.free - usage.ready,
            "requests": len(self._requests),
            "jobs": sum(port.jobs.unreleased for port in self._ports),
        }

    # --- a request ----------------------------------------------------------------------------

    def on_new_request(self, request: RequestContext, tiers: Collection[str] | None = None) -> None:
        """A request has arrived.

        Args:
            request: its context; its id must not be that of a request that is alive.
            tiers: names of the tiers that may be asked for it, where these are not all. What is
                in the primary tier, or on its way there, is found all the same.

        Raises:
            KVTierError: a request of that id is alive.
        """
        if request.request_id in self._requests:
            raise KVTierError(f"request {request.request_id!r} is alive already")
        mask = -1
        if tiers is not None:
            mask = sum(port.bit for port in self._ports if port.spec.name in tiers)
        self._requests[request.request_id] = RequestState(
            request, learns_order=self._policy.uses_prefix, tiers=mask
        )

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
        if state.prefix_order is not None:
            state.prefix_order.note(key)
        slot = self._primary.by_key.get(key)
        if slot is not None:
            return self._find(slot, state)
        question = state.asked.get(key)
        if question is None:
            question = self._ask(key, state)
            if question is None:
                return _MISS
        having = question.hits.get(key)
        # Whose load it joined may have asked tiers that are none of its own.
        if having and having & state.tiers:
            return self._promote(key, question, state)
        if question.waiting:
            if self._now_s <= question.deadline_s:
                return _RETRY
            self._questions.give_up(question)
        if having is None:
            self._count_miss(key, state, question.doubt or MissReason.ABSENT.value)
        else:
            self._count_miss(key, state, MissReason.LOAD_FAILED.value)
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
        slots = []
        for key in keys:
            slot = by_key.get(key)
            if slot is None or slot.state is not _READY:
                raise KVTierError(f"prepare_load of chunk {key.hex()}, which is not readable")
            slots.append(slot)
        indices = []
        sources = []
        from_primary = 0
        for key, slot in zip(keys, slots, strict=True):
            slot.pins += 1
            slot.copies += 1
            # What was promoted for this request came from its tier, also if it waited since.
            if key in state.claims:
                tier = self._promotions.let_go(key, state)
                sources.append(tier)
                self._ports[tier].stats.hit_chunks += 1
            else:
                sources.append(-1)
                from_primary += 1
            indices.append(slot.index)
            if key in state.copies:
                state.copies[key].append(slot)
            else:
                state.copies[key] = [slot]
        self._primary_stats.hit_chunks += from_primary
        self._touched.update(dict.fromkeys(keys))
        self._cascade.used(slots, state.context)
        return LoadSpec(indices, sources)

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
        copies, unpin = state.copies, self._primary.unpin
        for key in keys:
            slots = copies.get(key)
            if slots is None:
                continue
            slot = slots.pop()
            if not slots:
                del copies[key]
            slot.copies -= 1
            unpin(slot)
            loaded += 1
        self._primary_stats.loaded_chunks += loaded
        self._primary_stats.loaded_bytes += loaded * self._pool.chunk_bytes
        if state.finished:
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
        if state.prefix_order is not None:
            for key in keys:
                state.prefix_order.note(key)
        distinct = dict.fromkeys(keys)
        new = [key for key in distinct if key not in by_key]
        if len(new) > self._primary.free_slots:
            self._collect()
        if self._cascade.tracks and len(new) < len(distinct):
            present = [slot for key in distinct if (slot := by_key.get(key)) is not None]
            self._cascade.include(present, state.context)
        evicted = self._evicted = []
        slots = self._primary.take(len(new))
        self._evicted = None
        rejected = new[len(slots) :]
        if rejected:
            del new[len(slots) :]
            self._primary_stats.dropped["store.primary_full"] += len(rejected)
            self._cascade.note_missing(len(rejected))
        self._primary.assign(new, slots, _WRITING)
        state.writes.update(zip(new, slots, strict=True))
        if state.prefix_order is not None:
            for key, slot in zip(new, slots, strict=True):
                slot.parent, slot.position = state.prefix_order.note(key)
        return PrepareStoreOutput(new, [slot.index for slot in slots], evicted, rejected)

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
        writes = state.writes
        slots = [slot for key in keys if (slot := writes.pop(key, None)) is not None]
        if success and slots:
            self._primary.publish(slots, state.context)
            self._primary_stats.stored_chunks += len(slots)
            self._primary_stats.stored_bytes += len(slots) * self._pool.chunk_bytes
            self._cascade.stored(slots, state.context)
            if self._events.wanted:
                self._events.primary([slot.key for slot in slots], removed=False)
        elif slots:
            for slot in slots:
                self._primary.forget(slot)
        unpin = self._primary.unpin
        for slot in slots:
            unpin(slot)
        if state.finished:
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

    # --- a step -------------------------------------------------------------------------------

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
                self._requests[request_id].forget_answers()
        if self._touched:
            touched = list(self._touched)
            self._touched = {}
            self._primary.access(touched)
            # Reversed, so that the start of a prefix is the most recent here too.
            touched.reverse()
            for port in self._ports:
                port.touch(touched)
        self._cascade.keep_headroom()
        self._flush()
        for port in self._ports:
            if port.jobs:
                self._desk.give_up_overdue(port, self._now_s)
        self._primary.step += 1
        self._collected = False

    def has_pending_work(self) -> bool:
        """Whether the engine should go on stepping although no request is scheduled."""
        self._collect()
        # It may be the last that an engine asks before it sleeps: the next step collects anew.
        self._collected = False
        return self._cascade.behind or any(port.jobs or port.waiting for port in self._ports)

    def take_events(self) -> list[OffloadingEvent]:
        """Take the events since the last call, oldest first."""
        return self._events.take()

    # --- everything ---------------------------------------------------------------------------

    def reset_cache(self, scope: ResetScope = ResetScope.PRIMARY) -> None:
        """Forget what is cached; cold when it returns.

        Requests that are alive stay so, and begin anew: nothing is stored, loaded or answered
        for them. No completion may follow for copies that were prepared before; their slots are
        in quarantine until :meth:`on_reset_flushed`. What a tier is doing goes on, and has no
        effect here.

        With :attr:`ResetScope.ALL` the secondary tiers are emptied too, in the background: a tier
        is neither asked nor given anything until all chunks of this namespace have been deleted
        there, which is tried again where it fails. What other engines store meanwhile in a tier
        that they share may stay.

        Args:
            scope: how far the reset goes.
        """
        self._questions.forget()
        removed = []
        for slot in self._primary.slots:
            if slot.state in (_READY, _WRITING, _LOADING):
                if slot.state is _READY:
                    removed.append(slot.key)
                self._promotions.forget(slot)
        for port in self._ports:
            loads, stores = port.take_back()
            for index in loads:
                self._promotions.withdraw(index)
            for index in stores:
                self._primary.unpin(self._primary.slots[index])
        for state in list(self._requests.values()):
            self._stale_copies.extend(itertools.chain.from_iterable(state.copies.values()))
            self._stale_copies.extend(state.writes.values())
            state.copies.clear()
            state.writes.clear()
            state.claims.clear()
            state.forget_answers()
            self._end_if_over(state)
        self._touched.clear()
        self._cascade.forget()
        self._events.primary(removed, removed=True)
        if scope is ResetScope.ALL:
            for port in self._ports:
                port.begin_purge()
            self._flush()

    def on_reset_flushed(self) -> None:
        """The device copies of before the last reset have ended: their slots can be used again."""
        stale, self._stale_copies = self._stale_copies, []
        for slot in stale:
            self._primary.unpin(slot)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Let stores that run finish, close the tiers, and forget everything.

        Args:
            timeout_s: for each tier, for draining and for closing.
        """
        self._flush()
        with contextlib.ExitStack() as closing:
            # An interrupt that ends one of them leaves none of the others open.
            for port in reversed(self._ports):
                closing.callback(port.runner.close, timeout_s)
        self._collect()
        self._requests.clear()

    # --- inside -------------------------------------------------------------------------------

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

    def _find(self, slot: Slot, state: RequestState) -> LookupResult:
        """The chunk is in the primary tier, or on its way there."""
        if slot.state is _READY:
            if self._one_copy and slot.copies and slot.key not in state.copies:
                return _HIT_PENDING
            slot.hit_step = self._primary.step
            self._touched[slot.key] = None
            return _HIT
        if slot.state is _LOADING and slot.key not in state.claims:
            self._promotions.join(slot, state)
        return _HIT_PENDING

    def _ask(self, key: OffloadKey, state: RequestState) -> PendingLookup | None:
        """Put the question to the tiers, or join one that is open; ``None`` is a miss."""
        if not self._ports:
            return None
        # Who may not ask all of them has its answers for itself.
        question = self._questions.open.get(key) if state.tiers == -1 else None
        if question is None:
            question = state.asking
            if question is None or question.sealed:
                question = self._begin_question(state)
                if question is None:
                    may_ask = self._all_tiers & state.tiers
                    reason = MissReason.UNAVAILABLE if may_ask else MissReason.ABSENT
                    self._count_miss(key, state, reason.value)
                    return None
            question.keys.append(key)
            if question.shared:
                self._questions.open[key] = question
        state.asked[key] = question
        return question

    def _begin_question(self, state: RequestState) -> PendingLookup | None:
        """Ask the tiers that can be asked; ``None`` where none can."""
        may_ask = self._all_tiers & state.tiers
        tiers = 0
        for port in self._ports:
            if port.takes_reads:
                tiers |= port.bit & may_ask
        if not tiers:
            return None
        deadline_s = self._now_s + self._lookup_deadline_s
        question = self._questions.begin(state.context, tiers, deadline_s, shared=state.tiers == -1)
        if tiers != may_ask:
            question.doubt = MissReason.UNAVAILABLE.value
        state.asking = question
        return question

    def _promote(
        self, key: OffloadKey, question: PendingLookup, state: RequestState
    ) -> LookupResult:
        port = self._ports[question.best_hit(key, state.tiers)]
        while not port.takes_reads:
            # It had the chunk when it answered, and would refuse now.
            question.strike(key, port.index)
            if not question.hits[key] & state.tiers:
                self._count_miss(key, state, MissReason.UNAVAILABLE.value)
                return _MISS
            port = self._ports[question.best_hit(key, state.tiers)]
        room = port.load_room
        if not room:
            port.stats.dropped["load.queue_full"] += 1
            reason = MissReason.QUEUE_FULL
        elif not self._is_worth_loading(question, port):
            reason = MissReason.SLOWER_THAN_RECOMPUTE
        else:
            keys = [key]
            if question.request is state.context:
                # The scan will come to what was found behind this one too: one go for all of it.
                keys = question.found_from(key, port.index, room)
                by_key = self._primary.by_key
                if len(keys) > 1:
                    keys = [k for k in keys if k not in by_key]
            if self._promotions.start(keys, question, port, state):
                return _HIT_PENDING
            port.stats.dropped["load.primary_full"] += 1
            reason = MissReason.PRIMARY_FULL
        self._count_miss(key, state, reason.value)
        return _MISS

    def _is_worth_loading(self, question: PendingLookup, port: TierPort) -> bool:
        """Weigh, once a question, bringing all that was found against recomputing it."""
        if self._recompute_s is None:
            return True
        if question.worth_loading is None:
            found = len(question.hits)
            expected_s = port.expected_load_s(found, self._now_s)
            question.worth_loading = expected_s <= found * self._recompute_s
        return question.worth_loading

    def _count_miss(self, key: OffloadKey, state: RequestState, reason: str) -> None:
        if state.missed != key:
            state.missed = key
            self._primary_stats.misses[reason] += 1

    def _collect(self) -> None:
        """Take what the tiers have reported since the last time."""
        self._collected = True
        self._now_s = self._clock.now_s()
        for port in self._ports:
            reports = port.runner.poll()
            if reports:
                self._desk.take(port, reports, self._now_s)

    def _flush(self) -> None:
        """Hand over what was gathered, to each tier in one hop."""
        now_s = self._clock.now_s()
        questions = self._questions.take_new()
        for port in self._ports:
            port.flush(now_s, self._job_ids.__next__, questions, self._questions.handed_over)

    def _note_evicted(self, keys: Sequence[OffloadKey]) -> None:
        if self._evicted is not None:
            self._evicted.extend(keys)
        self._primary_stats.evicted_chunks += len(keys)
        self._events.primary(keys, removed=True)
