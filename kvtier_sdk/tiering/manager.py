"""The tiering manager, which is an engine scheduler's interface to all tiers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.events import ChunkNote, OffloadingEvent
from kvtier_sdk.hints import Receipt
from kvtier_sdk.metrics import PoolUsage, Sample, TierStats, metric_samples
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.pool import PoolMemory
from kvtier_sdk.registry import load_store_policy
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.runner.jobs import Job, Operation, Verdict
from kvtier_sdk.tiering.cascade import Cascade, ManagedTier
from kvtier_sdk.tiering.hint_executor import HintExecutor, OperatorHint
from kvtier_sdk.tiering.outputs import LoadSpec, PrepareStoreOutput, ResetScope
from kvtier_sdk.tiering.promotions import Promotions
from kvtier_sdk.tiering.records import RequestState, Slot, SlotState, Wait, check_keys
from kvtier_sdk.tiering.savings import Savings
from kvtier_sdk.tiering.search import TierSearch
from kvtier_sdk.tiering.slots import PrimaryTier, Purge
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener
from kvtier_sdk.tiering.uses import Uses
from kvtier_sdk.trace import TraceRecorder
from kvtier_sdk.types import LookupResult, OffloadKey, RequestContext

# Compiled code reads these module-level names faster than the members of an enumeration.
_HIT: Final = LookupResult.HIT
_MISS: Final = LookupResult.MISS
_HIT_PENDING: Final = LookupResult.HIT_PENDING
_RETRY: Final = LookupResult.RETRY
_READY: Final = SlotState.READY
_WRITING: Final = SlotState.WRITING
_LOADING: Final = SlotState.LOADING


class TieringManager:
    """Moves an engine's chunks between the primary tier and the secondary tiers.

    A step never blocks and never raises a storage error. Call all methods on the thread of the
    engine's scheduler, unless a method's description says otherwise.

    The engine begins a request with ``on_new_request``. In a step, it calls ``lookup`` for the
    request's chunks up to the first ``MISS``. While a chunk is pending, the engine repeats this in
    the next step. The calls ``prepare_load``, ``complete_load``, ``prepare_store`` and
    ``complete_store`` follow. After ``on_request_finished``, only the ``complete`` calls may still
    come. Each step ends with ``on_schedule_end``. For an unknown request, lookups and ``prepare``
    calls raise ``KVTierError``, and ``complete`` calls do nothing.

    :func:`kvtier_sdk.engine.open_manager` creates a manager from a configuration.
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
        namespace: Namespace | None = None,
        recorder: TraceRecorder | None = None,
        hint_share: float = 0.25,
        hint_duration_s: float = 3600.0,
        policy_now_s: Callable[[], float] | None = None,
        announce: Callable[[OffloadingEvent], None] | None = None,
    ) -> None:
        self._clock = clock
        self._policy_now_s = policy_now_s
        self._policy = policy
        self._recorder = recorder
        self._pool = pool
        self._one_copy = one_copy
        reserve = round(pool.slots * store_reserve)
        self._primary = PrimaryTier(
            *(pool.slots, pool.chunk_bytes, policy), events=events, announce=announce
        )
        self._by_key = self._primary.by_key  # saves an attribute access per chunk
        self.savings = Savings(self._primary.stats, namespace or Namespace({}), recompute_s)
        self._alive = 0  # requests that have not finished
        self._tiers: list[ManagedTier] = []
        self._promotions = Promotions(self._primary, limit=pool.slots - reserve)
        self._cascade = Cascade(self._primary, headroom_slots=reserve)
        self._requests: dict[str, RequestState] = {}
        self._search = TierSearch(self._tiers, self._primary, self._promotions, self._requests)
        self._hints = HintExecutor(self._search, clock, self._end_if_over)
        self._most_leased = pool.slots - reserve
        self.limit_hints(hint_share, hint_duration_s)
        self._uses = Uses(self._primary, policy, self._tiers, self._requests)
        self._stale_copies: list[Slot] = []  # the slots of copies that began before a reset
        self._collected = False
        self._now_s = 0.0
        self._read_clock()

    def add_tier(self, spec: TierSpec, runner: TierRunner) -> None:
        """Open a secondary tier with :meth:`TierClient.open`, and add it after the other tiers.

        ``spec`` describes the tier. The manager takes over ``runner``. A failed tier is not added.

        Raises:
            ConfigError: another tier has the same name, or a setting cannot work.
            BackendError: the tier's store policy cannot be found or loaded.
            TierError: the store refuses the credentials, or cannot be reached and is required.
        """
        if any(tier.client.spec.name == spec.name for tier in self._tiers):
            raise ConfigError(f"two tiers are named {spec.name!r}; give one of them another name")
        store_policy = load_store_policy(spec.runner.store_policy)
        index = len(self._tiers)
        client = TierClient(
            spec,
            runner,
            _Reports(self, index),
            clock=self._clock,
            chunk_bytes=self._pool.chunk_bytes,
            # Queued chunks are pinned. Without a limit, a slow tier could pin all of a small pool.
            max_store_bytes=(self._pool.slots + 1) // 2 * self._pool.chunk_bytes,
            events=self._primary.events.is_enabled,
            note_of=None if self._primary.announce is None else self._primary.note_of,
        )
        client.open()
        tier = ManagedTier(client, index, store_policy)
        self._tiers.append(tier)
        self.savings.add(client.stats)
        self._cascade.add(tier)

    @property
    def headroom_slots(self) -> int:
        """Number of slots that each step keeps free if a tier stores chunks before eviction."""
        return self._cascade.headroom_slots

    @property
    def stats(self) -> list[TierStats]:
        """Live metrics of the primary tier, then of each secondary tier in order."""
        self._primary.note_use()
        return [self._primary.stats, *(tier.client.stats for tier in self._tiers)]

    @property
    def clients(self) -> list[TierClient]:
        """The clients of the secondary tiers, in order."""
        return [tier.client for tier in self._tiers]

    @property
    def last_step_s(self) -> float:
        """Clock time of the manager's last poll of the tiers."""
        return self._now_s

    def samples(self) -> list[Sample]:
        """Return the current value of each metric, even while the engine is idle.

        Any thread may call this method, for example a thread of :func:`kvtier_sdk.serve_metrics`.
        """
        self._primary.note_use()
        stats = [self._primary.stats, *(tier.client.stats_now() for tier in self._tiers)]
        return list(metric_samples(stats, self.usage()))

    def usage(self) -> PoolUsage:
        """Count the host pool's slots by use. This method is too slow to call in each step."""
        held = set(itertools.chain.from_iterable(tier.client.held_slots() for tier in self._tiers))
        # Copy the table, because the engine's thread may change it while another thread reads it.
        for state in list(self._requests.values()):
            held.update(state.held_slots())
        return self._primary.usage(held)

    def left_over(self) -> dict[str, int]:
        """Count pins, used slots, requests and jobs. All counts are 0 after all work has ended."""
        usage = self.usage()
        return {
            "pins": self._primary.pins,
            "slots": usage.slots - usage.free - usage.ready,
            "requests": len(self._requests),
            "jobs": sum(tier.client.jobs.unreleased for tier in self._tiers),
        }

    def on_new_request(self, request: RequestContext, tiers: Collection[str] | None = None) -> None:
        """Register a new request.

        Args:
            request: the request's context, with an id that no live request has.
            tiers: names of the tiers to search; all if ``None``. Chunks in the primary tier, and
                chunks that are being loaded, are always found.

        Raises:
            KVTierError: a request with the same id is alive.
        """
        if request.request_id in self._requests:
            raise KVTierError(f"request {request.request_id!r} is alive already")
        allowed = [tier.bit for tier in self._tiers if tier.client.spec.name in (tiers or ())]
        mask = -1 if tiers is None else sum(allowed)
        named: dict[OffloadKey, None] | None = None
        arrived_s = 0.0
        if self._recorder is not None or request.hints or request.session is not None:
            named, arrived_s = {}, self._clock.now_s()
        self._hints.begin(request)
        self._requests[request.request_id] = RequestState(
            request, named, tiers=mask, arrived_s=arrived_s
        )
        self._alive += 1

    def lookup(self, key: OffloadKey, request: RequestContext) -> LookupResult:
        """Look up a chunk.

        Returns:
            ``HIT``: the chunk is readable, and ``prepare_load`` in this step succeeds.
            ``HIT_PENDING``: the chunk will soon be readable; ask again next step.
            ``RETRY``: a tier has not answered, or a load begins at the end of the step; ask again
            next step. The wait's lookup deadline begins when :meth:`is_put_off` returns false.
            ``MISS``: recompute the chunk.

        Raises:
            KVTierError: the request is unknown, or the key is not ``bytes``.
        """
        if not self._collected:
            self._collect()
        state = self._requests.get(request.request_id) or self._state(request)
        slot = self._by_key.get(key)
        if state.named is not None:
            state.named[key] = None
        if slot is None:
            return self._search.find(key, state)
        if slot.state is _READY:
            if self._one_copy and slot.copies and key not in state.copies:
                return _HIT_PENDING
            slot.hit_step = self._primary.step
            return _HIT
        if slot.state is _LOADING and key not in state.claims:
            self._promotions.join(slot, state)
        wait = state.wait_in(self._primary.step)
        if wait.slot is None:
            wait.slot, wait.key, wait.state = slot, slot.key, slot.state
        return _HIT_PENDING

    def is_waiting(self, request: RequestContext) -> bool:
        """Return true if a request waits, and nothing has changed since its last lookups.

        While the result is true, the engine can skip the request's lookups. After the wait, it must
        look up all chunks again, because readable chunks may have been evicted in the meantime. The
        result is false if no chunk of the request is pending.
        """
        return self._wait_of(self._state(request)) is not None

    def is_put_off(self, request: RequestContext) -> bool:
        """Return true if a request's lookups must wait for the lookups of earlier requests.

        Only about 16,000 chunks are looked up at once, so that a step with thousands of new
        requests takes no longer than other steps.
        """
        wait = self._state(request).wait
        return wait is not None and wait.put_off is not None and wait.step == self._primary.step

    def lookup_prefix(
        self, keys: Sequence[OffloadKey], request: RequestContext
    ) -> tuple[int, bool]:
        """Look up the chunks of a prefix from the start to the first miss.

        Returns:
            The number of chunks found before the first miss, and whether an answer or a chunk is
            still pending. If so, the engine should call this method again next step. While nothing
            has changed, the method returns the same result without new lookups.

        ::

            chunks, pending = manager.lookup_prefix(keys, request)
            if not pending:
                spec = manager.prepare_load(keys[:chunks], request)
        """
        state = self._state(request)
        prefix = (keys[0], keys[-1]) if keys else None
        wait = self._wait_of(state)
        if wait is not None and wait.prefix == prefix:
            return wait.hits, True
        hits = 0
        pending = False
        for key in keys:
            result = self.lookup(key, request)
            if result is _MISS:
                break
            if result is not _HIT:
                pending = True
            # Continue after a RETRY, so that one step looks up the whole prefix.
            if result is not _RETRY:
                hits += 1
            elif state.turn != self._primary.step and self.is_put_off(request):
                break
        if pending and state.wait is not None:
            state.wait.prefix, state.wait.hits = prefix, hits
        return hits, pending

    def prepare_load(self, keys: Sequence[OffloadKey], request: RequestContext) -> LoadSpec:
        """Pin chunks for a copy to the device.

        Args:
            keys: chunks for which :meth:`lookup` returned ``HIT`` in this step.
            request: the request, which holds the pins until :meth:`complete_load`.

        Raises:
            KVTierError: a chunk is not readable, or the request is unknown; no chunk is pinned.
        """
        state = self._state(request)
        by_key = self._by_key
        slots = []
        for key in keys:
            slot = by_key.get(key)
            if slot is None or slot.state is not _READY:
                raise KVTierError(f"prepare_load of chunk {key.hex()}, which is not readable")
            slots.append(slot)
        sources = []
        for key, slot in zip(keys, slots, strict=True):
            slot.pins += 1
            slot.copies += 1
            state.copies.setdefault(key, []).append(slot)
            # A chunk that was promoted for this request counts as a hit of its source tier.
            if key in state.claims:
                sources.append(self._promotions.let_go(key, state))
            else:
                sources.append(-1)
        self.savings.note(keys, sources)
        self._uses.note(keys, state.context)
        self._cascade.used(slots, sources, state.context)
        return LoadSpec([slot.index for slot in slots], sources)

    def complete_load(self, keys: Collection[OffloadKey], request: RequestContext) -> None:
        """End the copies of ``keys`` to the device, after success or failure.

        The method ignores an unknown ``request``, and chunks that were not prepared for it.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        loaded = 0
        copies = state.copies
        for key in keys:
            slots = copies.get(key)
            if slots is None:
                continue
            slot = slots.pop()
            if not slots:
                del copies[key]
            slot.copies -= 1
            self._primary.unpin(slot)
            loaded += 1
        self._primary.stats.loaded_chunks += loaded
        self._primary.stats.loaded_bytes += loaded * self._pool.chunk_bytes
        if state.finished:
            self._end_if_over(state)

    def touch(self, keys: Collection[OffloadKey], request: RequestContext) -> None:
        """Record that ``request`` uses the chunks ``keys``, in prefix order.

        :meth:`prepare_load` records the use of its chunks itself.
        """
        check_keys(keys)
        self._uses.note(keys, request)

    def prepare_store(
        self, keys: Collection[OffloadKey], request: RequestContext
    ) -> PrepareStoreOutput:
        """Assign slots to chunks that the device will write.

        Args:
            keys: chunks, in prefix order; chunks already in the primary tier get no new slot.
            request: the request, which holds the slots until :meth:`complete_store`.

        Returns:
            The chunks to store and their slots. If slots run out, only the first keys get a slot.

        Raises:
            KVTierError: the request is unknown, or a key is not ``bytes``; no slot is taken.
        """
        state = self._state(request)
        by_key = self._by_key
        distinct = dict.fromkeys(keys)
        new = [key for key in distinct if key not in by_key]
        check_keys(new)
        if state.named is not None:
            state.named.update(distinct)
        if len(new) > self._primary.free_slots:
            self._collect()
        if len(new) < len(distinct):
            present = [slot for key in distinct if (slot := by_key.get(key)) is not None]
            # Count a use, because the request computes these chunks again after an earlier miss.
            self._uses.note([slot.key for slot in present], state.context)
            if self._cascade.tracks and not state.context.is_over:
                self._cascade.include(present, state.context)
        slots, evicted = self._primary.take(len(new))
        rejected = new[len(slots) :]
        if rejected:
            del new[len(slots) :]
            self._primary.stats.dropped["store.primary_full"] += len(rejected)
            self._cascade.lacked_room(rejected)
        self._primary.assign(new, slots, _WRITING)
        state.writes.update(zip(new, slots, strict=True))
        if new:
            self.savings.rate.named(len(new), self._clock.now_s())
        return PrepareStoreOutput(new, [slot.index for slot in slots], list(evicted), rejected)

    def describe(self, key: OffloadKey, make_note: Callable[[], ChunkNote]) -> None:
        """Attach the note from ``make_note`` to the pool's chunk ``key`` if it has no note."""
        slot = self._by_key.get(key)
        if slot is not None and not slot.note:
            slot.note = make_note().encode()
            if slot.state is _READY:
                self._primary.events.describe(key, slot.note)

    def complete_store(
        self, keys: Collection[OffloadKey], request: RequestContext, success: bool = True
    ) -> None:
        """End the device's writes: make the chunks ``keys`` readable, and offer them to the tiers.

        If ``success`` is false, the chunks are dropped. The method ignores an unknown ``request``,
        and chunks that were not prepared for the request.
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
            self._primary.stats.stored_chunks += len(slots)
            self._primary.stats.stored_bytes += len(slots) * self._pool.chunk_bytes
            self._cascade.stored(slots, state.context)
        elif slots:
            for slot in slots:
                self._primary.forget(slot)
        for slot in slots:
            self._primary.unpin(slot)
        if state.finished:
            self._end_if_over(state)

    def on_request_finished(
        self,
        request: RequestContext,
        end_tokens: Mapping[OffloadKey, int] | None = None,
        *,
        stop: str | None = None,
    ) -> None:
        """End a complete or aborted request; only the two ``complete`` calls may follow.

        The request's pins are released, except the pins of running copies. The request's stores
        are handed to the tiers now, because the engine may make no further step.

        Args:
            request: the request; an unknown request is ignored.
            end_tokens: maps each chunk of the request, in prefix order, to the number of tokens up
                to the chunk's end; includes chunks that were on the device. Do not change the
                mapping after the call. Without the mapping, traces have no lengths, hints cannot
                name tokens, and traces and hints omit chunks that were neither looked up nor
                stored.
            stop: the reason why the answer ended, such as ``"tool_use"``. The policy learns for
                each reason when the next turn comes.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if self._recorder is not None and state.named is not None and not state.finished:
            self._recorder.record(state.arrived_s, state.named, end_tokens or {})
        if not state.finished:
            state.finished = True
            state.stop = stop
            if state.named is not None or self._primary.leases.held:
                self._hints.finish(state, end_tokens or {})
            self._alive -= 1
            if not self._alive:
                # End the compute rate's burst now, because the engine may make no further step.
                self.savings.rate.burst_ended(self._clock.now_s())
        self._promotions.abandon(state)
        self._end_if_over(state)
        self._flush()

    def on_schedule_end(self, preempted_request_ids: Collection[str] = ()) -> None:
        """End a step: apply results, record uses, and hand the collected jobs to the tiers.

        The requests ``preempted_request_ids`` have lost their device blocks. Their answers from
        tiers are forgotten, because the engine will look up the chunks again.
        """
        if not self._collected:
            self._collect()
        for request_id in preempted_request_ids:
            if request_id in self._requests:
                self._requests[request_id].forget_answers()
        self._uses.tell()
        self._hints.step()
        # Report ended prefetches now, because the engine may make no further step.
        self._uses.tell_ends()
        self.savings.step_ended(self._now_s)
        self._cascade.keep_headroom()
        self._flush()
        self._search.lookups.step_ended()
        self._primary.step += 1
        self._collected = False

    def has_pending_work(self) -> bool:
        """Return true if the engine should make further steps even without scheduled requests."""
        self._collect()
        # The next step must poll the tiers again, because the engine may sleep after this call.
        self._collected = False
        has_work = any(tier.client.has_work for tier in self._tiers)
        return has_work or self._cascade.behind or self._hints.has_work

    def take_receipts(self) -> list[Receipt]:
        """Return the receipts since the last call, oldest first. At most 1,024 are kept."""
        receipts = list(self._hints.receipts)
        self._hints.receipts.clear()
        return receipts

    def limit_hints(self, share: float, duration_s: float) -> None:
        """Limit later hints to a ``share`` of slots and ``duration_s``. Any thread may call it."""
        self._primary.leases.budget = min(int(self._pool.slots * share), self._most_leased)
        self._hints.max_duration_s = duration_s

    def give_hint(self, hint: OperatorHint) -> None:
        """Carry out an operator's hint at the end of the next step; any thread may call this."""
        self._hints.of_operator.append(hint)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the events since the last call, grouped by tier, and oldest first in each tier."""
        events = [self._primary.events.take(), *(t.client.take_events() for t in self._tiers)]
        return list(itertools.chain.from_iterable(events))

    def reset_cache(self, scope: ResetScope = ResetScope.PRIMARY) -> None:
        """Forget all cached chunks, so that later lookups cannot find them in the primary tier.

        Live requests start over: their pending lookups, loads and stores are dropped. The engine
        must not call ``complete`` methods for copies prepared before the reset. The copies' slots
        stay reserved until :meth:`on_reset_flushed`. The tiers' running jobs go on without effect.

        If ``scope`` is :attr:`ResetScope.ALL`, the secondary tiers are emptied too, in the
        background. A tier gets no lookups, loads or stores until all chunks of the namespace are
        deleted from the tier; a failed deletion is retried. Chunks that other engines store in a
        shared tier during the deletion may stay.
        """
        self._search.lookups.forget()
        removed = self._promotions.forget_all()
        for tier in self._tiers:
            tier.client.withdraw()
        for state in list(self._requests.values()):
            self._stale_copies += state.start_over()
            self._end_if_over(state)
        self._uses.forget()
        self._hints.reset()
        self._cascade.missing = 0
        self._primary.events.add(removed, removed=True)
        if scope is ResetScope.ALL:
            for tier in self._tiers:
                tier.client.purge()
            self._flush()

    def purge_pool(self) -> Purge:
        """Forget the host pool's chunks at the start of the next step; any thread may call this.

        Chunks in use, for example by a store into a tier, are forgotten in later steps, which
        update the returned purge. Live requests continue.
        """
        return self._primary.purge()

    def on_reset_flushed(self) -> None:
        """Free the slots of copies that began before the last reset. The copies must have ended."""
        stale, self._stale_copies = self._stale_copies, []
        for slot in stale:
            self._primary.unpin(slot)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Close the tiers, and forget all requests. Each drain and close may take ``timeout_s``."""
        self._flush()
        with contextlib.ExitStack() as closing:
            # Close the other tiers even if an interrupt arrives while one tier closes.
            for tier in reversed(self._tiers):
                closing.callback(tier.client.close, timeout_s)
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
        if state.over and self._requests.pop(state.context.request_id, None) is not None:
            self._uses.note_end(state.context, state.stop)

    def _wait_of(self, state: RequestState) -> Wait | None:
        if not self._collected:
            self._collect()
        return self._search.wait_of(state)

    def _read_clock(self) -> None:
        now_s = self._now_s = self._primary.now_s = self._clock.now_s()
        self._policy.now_s = now_s if self._policy_now_s is None else self._policy_now_s()

    def _collect(self) -> None:
        self._collected = True
        self._read_clock()
        for tier in self._tiers:
            tier.client.poll()
        self._primary.begin_step()

    def _flush(self) -> None:
        self._search.hand_over()
        for tier in self._tiers:
            tier.client.flush()


class _Reports(TierListener):
    def __init__(self, manager: TieringManager, index: int) -> None:
        self._manager = manager
        self._index = index

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._manager._search.lookups.answered(job.tag, 1 << self._index, verdicts)

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        manager = self._manager
        landed = manager._promotions.concluded(job, verdicts)
        if landed:
            manager._primary.publish(landed, job.request)
            manager._uses.note_if_over(job.request)
            manager._cascade.landed(landed)

    def stored(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        self._manager._cascade.settled(self._index, job, verdicts)

    def removed(self, tier: TierClient, keys: Sequence[OffloadKey], *, evicted: bool) -> None:
        self._manager._promotions.removed(self._index, keys)
        self._manager._cascade.removed(self._index, keys, evicted=evicted)

    def released(self, tier: TierClient, job: Job) -> None:
        if job.operation is Operation.STORE:
            primary = self._manager._primary
            for index in job.slots:
                primary.unpin(primary.slots[index])
        elif job.operation is Operation.LOAD:
            self._manager._promotions.released(job)
