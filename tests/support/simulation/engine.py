"""A simulated engine, whose requests arrive, wait, load, store, are preempted, and end."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from kvtier_sdk.hints import Verb
from kvtier_sdk.tiering.outputs import ResetScope
from kvtier_sdk.tiering.records import PendingLookup, SlotState
from kvtier_sdk.types import LookupResult, OffloadKey, RequestContext
from support.simulation.breach import short
from support.simulation.device import Copy
from support.simulation.plan import Plan

if TYPE_CHECKING:
    from support.simulation.world import World

_READY = SlotState.READY
_LONGEST_FLUSH_STEPS = 6


class _Phase(Enum):
    #: The request looks up its prefix until no answer is pending.
    WAITING = "waiting"
    #: The request's hits are being copied to the device.
    LOADING = "loading"
    #: The request computes and stores its other chunks.
    RUNNING = "running"


class _Request:
    __slots__ = ("context", "done", "path", "phase", "waits_since_s")

    def __init__(self, context: RequestContext, path: bytes, now_s: float) -> None:
        self.context = context
        self.path = path
        self.wait(now_s)

    def wait(self, now_s: float) -> None:
        self.phase = _Phase.WAITING
        self.done = 0  # chunks loaded or offered for storing, from the start of the path
        self.waits_since_s = now_s


class Engine:
    def __init__(self, world: World) -> None:
        self.counts = world.counts
        # Pairs of a request and a chunk that the request looked up and did not find.
        self.missed: set[tuple[str, OffloadKey]] = set()
        self.step = 0
        self.requests: list[_Request] = []
        # The tiers that each restricted request may use, by the request's id.
        self.choosy: dict[str, set[str]] = {}
        # The number of chunks whose copy ended after the request's end. No tier is offered them.
        self.kept_back = 0
        self._manager = world.manager
        self._inside = world.inside
        self._device = world.device
        self._tree = world.tree
        self._plan = world.plan
        self._rng = world.rng
        self._hints = world.hints
        self._record = world.record
        self._clock = world.clock
        self._note = world.journal.note
        self._breach = world.breach
        self._resetting = world.resetting
        self._patience_s = _patience_s(world.plan)
        self._arrived = 0
        self._ended: set[str] = set()
        self._flush_step = 0
        # Requests that load at the end of the step, after other requests have got slots.
        self._later: list[tuple[_Request, list[OffloadKey]]] = []

    def run_step(self, *, arrivals: bool = True) -> None:
        self.step += 1
        self._device.run()
        self.complete_copies(self._device.due(self.step))
        preempted: list[str] = []
        if arrivals:
            preempted = self._disturb()
        elif self._device.stale:
            self._flush()
        for request in list(self.requests):
            self._act(request)
        for request, keys in self._later:
            self._load(request, keys)
        self._later.clear()
        self.end_step(preempted, is_calm=not arrivals)

    def end_step(self, preempted: Sequence[str] = (), *, is_calm: bool = False) -> None:
        asked = None if is_calm else self._hints.of_operator()
        # Skip a pin during prefetches, because a prefetch could use the pin's budget in the same
        # call, and the record would not notice.
        if asked is not None and asked.hint.verb is Verb.PIN and self._inside.prefetches:
            asked = None
        if asked is not None:
            self._note("operator", asked.hint, asked.session, asked.tenant)
            self._manager.give_hint(asked)
            # Read the tiers' reports now, so that the record and the hint see the same pool.
            if not self._manager.has_pending_work():
                self._breach("pending work is told", "none, says the manager of a hint")
        with self._record.ending_step(asked):
            self._manager.on_schedule_end(preempted)

    def complete_copies(self, copies: Sequence[Copy]) -> None:
        groups: dict[tuple[str, bool], list[Copy]] = {}
        for copy in copies:
            groups.setdefault((copy.request_id, copy.writes), []).append(copy)
        for (request_id, writes), group in groups.items():
            keys: Collection[OffloadKey] = [copy.key for copy in group]
            success = self._rng.random() < 0.95
            self._device.end(group, success=success)
            if len(set(keys)) == len(keys) and self._rng.random() < 0.5:
                keys = set(keys)
            context = RequestContext(request_id)
            if writes:
                self._count("stores completed" if success else "stores failed")
                self._note("complete_store", request_id, [c.key for c in group], success)
                self.kept_back += len(group) if success and request_id in self._ended else 0
                self._manager.complete_store(keys, context, success)
            else:
                self._count("loads completed")
                self._note("complete_load", request_id, [c.key for c in group])
                self._manager.complete_load(keys, context)

    def abort_all(self) -> None:
        for request in list(self.requests):
            self._finish(request, "aborted")

    def excuse(self, duration_s: float) -> None:
        """Exclude a pause caused by the engine from the requests' waits."""
        for request in self.requests:
            request.waits_since_s += duration_s

    # --- events from outside ------------------------------------------------------------------

    def _disturb(self) -> list[str]:
        rng = self._rng
        while len(self.requests) < self._plan.requests and rng.random() < 0.6:
            self._arrive()
        if self.requests and rng.random() < 0.06:
            self._finish(rng.choice(self.requests), "aborted")
        if self._device.stale and self.step >= self._flush_step:
            self._flush()
        if rng.random() < self._plan.reset_rate:
            self._reset()
        if self.requests and rng.random() < 0.1:
            request = rng.choice(self.requests)
            keys = self._tree.keys(request.path)
            keys = rng.sample(keys, rng.randint(1, len(keys)))
            self._count("touches")
            self._note("touch", request.context.request_id, keys)
            self._manager.touch(keys, request.context)
        preempted = []
        if self.requests and rng.random() < 0.08:
            request = rng.choice(self.requests)
            request.wait(self._clock.now_s())
            preempted.append(request.context.request_id)
            self._count("preemptions")
            self._note("preempt", preempted)
        return preempted

    def _arrive(self) -> None:
        self._arrived += 1
        path = self._tree.new_path()
        context = self._hints.request(f"r{self._arrived}", path)
        if context.is_over:
            self._ended.add(context.request_id)
        self._count("requests")
        self._note("request", context.request_id, self._tree.keys(path))
        self.requests.append(_Request(context, path, self._clock.now_s()))
        tiers = None
        if self._rng.random() < self._plan.choosy_rate:
            tiers = {tier.name for tier in self._plan.tiers if self._rng.random() < 0.5}
            self.choosy[context.request_id] = tiers
            self._count("choosy requests")
        self._manager.on_new_request(context, tiers)
        self._record.begun(context)

    def _reset(self) -> None:
        scope = self._rng.choice(list(ResetScope))
        self._count(f"resets of {scope.value}")
        self._note("reset", scope.value)
        self._device.make_stale()
        with self._resetting(scope):
            self._manager.reset_cache(scope)
        self._flush_step = self.step + self._rng.randint(0, _LONGEST_FLUSH_STEPS)
        for request in self.requests:
            request.wait(self._clock.now_s())

    def _flush(self) -> None:
        self._note("reset flushed")
        self._device.flush()
        self._manager.on_reset_flushed()

    def _finish(self, request: _Request, how: str) -> None:
        self._count(f"requests {how} while {request.phase.value}")
        self._note(how, request.context.request_id)
        self.requests.remove(request)
        self._tree.ended(request.path)
        ended = self._tree.keys(request.path)
        ends = self._hints.end_tokens(ended[: request.done], self._tree.groups)
        keys = list(ends or self._inside.named(request.context.request_id))
        with self._record.finishing(request.context, keys, ends):
            self._manager.on_request_finished(request.context, ends)
        if any(item for tier in self._inside.tiers for item in self._inside.collected(tier)):
            self._breach(
                "stores do not wait for another step", f"after {request.context.request_id}"
            )

    # --- the course of a request --------------------------------------------------------------

    def _act(self, request: _Request) -> None:
        if request.phase is _Phase.WAITING:
            # An engine need not look up all waiting requests in each step.
            if self._rng.random() < 0.9:
                self._look(request)
        elif request.phase is _Phase.LOADING:
            request_id = request.context.request_id
            if not any(c.request_id == request_id and not c.writes for c in self._device.live):
                request.phase = _Phase.RUNNING
        elif self._rng.random() < 0.8:
            self._compute(request)

    def _look(self, request: _Request) -> None:
        keys = self._tree.keys(request.path)
        if self._rng.random() < 0.5 and self._manager.is_waiting(request.context):
            self._check_wait(keys, request.context)
            hits, pending = 0, True
        elif self._rng.random() < 0.3:
            hits, pending = self._manager.lookup_prefix(keys, request.context)
            # Read the misses from the manager, because the answer does not name the missing chunk.
            request_id = request.context.request_id
            self.missed |= {(request_id, key) for key in self._inside.missed(request_id)}
            self._note("lookup_prefix", request.context.request_id, keys, hits, pending)
        else:
            hits, pending = self._look_one_by_one(keys, request.context)
        waited_s = self._clock.now_s() - request.waits_since_s
        if pending:
            self._count("lookups pending")
            if self._manager.is_put_off(request.context):
                self._count("lookups put off")
            if waited_s > self._patience_s:
                self._breach(
                    "nothing waits for ever",
                    f"{request.context.request_id} has waited {waited_s:g} s, "
                    f"{self._patience_s:g} s is the most",
                )
            return
        self._count("lookups with hits" if hits else "lookups without hits")
        # Sometimes the device has no room, and the request looks up again later.
        if self._rng.random() < 0.1:
            request.waits_since_s = self._clock.now_s()
            return
        request.phase, request.done = _Phase.RUNNING, hits
        if hits and self._rng.random() < 0.3:
            self._later.append((request, keys[:hits]))
        elif hits:
            self._load(request, keys[:hits])

    def _look_one_by_one(
        self, keys: Sequence[OffloadKey], context: RequestContext
    ) -> tuple[int, bool]:
        hits, pending = 0, False
        answers = []
        for key in keys:
            answer = self._manager.lookup(key, context)
            answers.append(answer.name)
            self._check_answer(key, answer, context)
            self._count(f"lookup {answer.name}")
            if answer is LookupResult.MISS:
                self.missed.add((context.request_id, key))
                break
            pending = pending or answer is not LookupResult.HIT
            hits += 1
        self._note("lookup", context.request_id, keys[: len(answers)], answers)
        return hits, pending

    def _check_answer(self, key: OffloadKey, answer: LookupResult, context: RequestContext) -> None:
        slot = self._inside.primary.by_key.get(key)
        readable = slot is not None and slot.state is _READY
        pending = self._inside.asked(context.request_id, key)
        true = {
            LookupResult.HIT: readable,
            LookupResult.MISS: slot is None,
            LookupResult.HIT_PENDING: slot is not None and (not readable or self._plan.one_copy),
            LookupResult.RETRY: slot is None and self._awaits(pending),
        }[answer]
        if not true:
            state = "not in the primary tier" if slot is None else slot.state.value
            self._breach("an answer is true", f"{answer.name} for {short(key)}, which is {state}")

    def _awaits(self, pending: PendingLookup | None) -> bool:
        if pending is None:
            return self._inside.lookups_full
        return pending.waiting != 0 or not pending.sealed

    def _check_wait(self, keys: Sequence[OffloadKey], context: RequestContext) -> None:
        self._count("lookups left out")
        for key in keys:
            slot = self._inside.primary.by_key.get(key)
            asked = self._inside.asked(context.request_id, key)
            if slot is not None and slot.state is not _READY:
                return
            if asked.waiting if asked is not None else slot is None and self._inside.lookups_full:
                return
        self._breach("an answer is true", f"{context.request_id} waits for nothing")

    def _load(self, request: _Request, keys: Sequence[OffloadKey]) -> None:
        request.phase = _Phase.LOADING
        request_id = request.context.request_id
        self._record.uses(keys, request.context)
        spec = self._manager.prepare_load(keys, request.context)
        self._count("chunks loaded", len(keys))
        self._count("chunks loaded from a tier", sum(source >= 0 for source in spec.sources))
        self._note("prepare_load", request_id, keys, spec.slots)
        self._device.begin(request_id, keys, spec.slots, self.step, writes=False)

    def _compute(self, request: _Request) -> None:
        keys = self._tree.keys(request.path)
        if request.done >= len(keys):
            if self._rng.random() < 0.3:
                request.path = self._tree.longer(request.path)
            else:
                self._finish(request, "finished")
            return
        end = request.done + self._tree.groups * self._rng.randint(1, 3)
        begin = 0 if self._rng.random() < 0.2 else request.done
        wanted = keys[begin:end]
        request.done = min(end, len(keys))
        request_id = request.context.request_id
        self._record.uses(wanted, request.context)
        output = self._manager.prepare_store(wanted, request.context)
        self._record.stores(output.keys_to_store, request.context)
        self._count("chunks to store", len(output.keys_to_store))
        self._count("chunks rejected", len(output.rejected_keys))
        self._count("chunks evicted", len(output.evicted_keys))
        self._note("prepare_store", request_id, output.keys_to_store, output.slots)
        self._device.begin(request_id, output.keys_to_store, output.slots, self.step, writes=True)

    def _count(self, what: str, times: int = 1) -> None:
        self.counts[what] += times


def _patience_s(plan: Plan) -> float:
    step_s = plan.step_s * len(plan.tiers)
    # Budget a lookup deadline per request, because requests take turns if lookups are limited.
    lookups_s = plan.requests * _lookup_deadline_s(plan)
    loads_s = sum(float(tier.options["load_deadline"]) for tier in plan.tiers)
    chunks = 2 * plan.depth * plan.groups
    return chunks * (lookups_s + loads_s + 12 * step_s)


def _lookup_deadline_s(plan: Plan) -> float:
    return max(float(tier.options["lookup_deadline"]) for tier in plan.tiers)
