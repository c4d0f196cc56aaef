"""Checks receipts of hints, prefetches, and the chunks of ended requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvtier_sdk.hints import DEFAULT_PRIORITY, Hint, Outcome, Receipt, Verb
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.tiering.hint_executor import OperatorHint
from kvtier_sdk.types import OffloadKey, RequestContext
from support.simulation.hints import TOKENS
from support.simulation.leases import LeaseRecord, Terms, within

if TYPE_CHECKING:
    from support.simulation.world import World

#: The prefix of a prefetch's request id, and the duration of its leases.
_PREFETCH = "kvtier prefetch "
_PREFETCH_S = 60.0
_WINDOW = 64


@dataclass(frozen=True, slots=True)
class _Prefetch:
    request_id: str
    tenant: str
    session: str | None  # the session whose chunks are loaded
    owner: str
    keys: Sequence[OffloadKey]
    until_s: float


class HintRecord:
    """The open prefetches, the leases, and the chunks of ended requests."""

    def __init__(self, world: World) -> None:
        self.leases = LeaseRecord(world)
        # Chunks stored by requests that had already ended, and not used by another request since.
        self.withheld: set[OffloadKey] = set()
        self._manager = world.manager
        self._inside = world.inside
        self._ledgers = world.ledgers
        self._clock = world.clock
        self._note = world.journal.note
        self._breach = world.breach
        self._excuse = world.spills.excuse
        # Chunks in the pool whose last store was by an ended request.
        self._of_ended: set[OffloadKey] = set()
        self._groups = world.plan.groups
        self._longest_s = world.hints.longest_s
        self._window = max(1, min(_WINDOW, world.plan.slots // 16))
        self._counts = world.counts
        self._open: list[_Prefetch] = []
        self._sessions: dict[tuple[str, str | None], Sequence[OffloadKey]] = {}

    def arrived(self, key: OffloadKey) -> None:
        self.leases.arrived(key)
        if key in self._of_ended:
            self._excuse([key])

    def left(self, key: OffloadKey) -> None:
        self.withheld.discard(key)
        self._of_ended.discard(key)
        self.leases.left(key)

    def uses(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        if not request.is_over:
            self.withheld.difference_update(keys)

    def stores(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        if request.is_over:
            self.withheld.update(keys)
            self._of_ended.update(keys)
        else:
            self._of_ended.difference_update(keys)

    # --- the calls that carry out hints -------------------------------------------------------

    def begun(self, request: RequestContext) -> None:
        """Check that a turn ends the prefetches for its session."""
        for receipt in self._take():
            if receipt.outcome is not Outcome.EXPIRED:
                self._complain(f"at a turn: {receipt}")
            self._close(receipt)
        for prefetch in self._open:
            whose = prefetch.tenant, prefetch.session
            if request.session and whose == (request.tenant, request.session):
                self._breach("a turn ends its prefetch", f"{prefetch.request_id} goes on")

    @contextmanager
    def finishing(
        self,
        request: RequestContext,
        keys: Sequence[OffloadKey],
        ends: Mapping[OffloadKey, int] | None,
    ) -> Iterator[None]:
        here = list(self._inside.primary.by_key)
        if request.is_over:
            # An aborted turn ends its session, so the chunks of the previous turn are not needed.
            self._excuse([*keys, *self._sessions.get((request.tenant, request.session), ())])
        self.leases.begin()
        yield
        self.leases.used(keys)
        # Release the prefetched chunks, because their turn is over.
        own = set(
            self.leases.of(request.tenant, f"{request.session or request.request_id} prefetch")
        )
        self.leases.end([key for key in keys if key in own])
        if request.session is not None and keys:
            self._sessions[request.tenant, request.session] = keys
        receipts = self._take()
        if len(receipts) != len(request.hints):
            self._complain(f"{len(receipts)} for {len(request.hints)} hints")
        for hint, receipt in zip(request.hints, receipts, strict=True):
            self._answer(hint, receipt, request, keys if ends or not hint.tokens else (), here)
        self.leases.settle()

    @contextmanager
    def ending_step(self, asked: OperatorHint | None) -> Iterator[None]:
        here = list(self._inside.primary.by_key)
        if asked is not None and asked.hint.verb is Verb.END:
            self._excuse(self._sessions.get((asked.tenant, asked.session), ()))
        before = self._prefetch_loads()
        self.leases.begin()
        yield
        prefetches = list(self._open)
        for receipt in self._take():
            is_answer = asked is not None and receipt.verb is asked.hint.verb
            if asked is not None and is_answer and not receipt.request_id:
                if asked.receipt is None:
                    self._complain("an operator got none")
                request = RequestContext("", session=asked.session, tenant=asked.tenant)
                keys = self._sessions.get((asked.tenant, asked.session), ())
                named = asked.session if asked.hint.verb is Verb.PREFETCH else None
                hint = Hint(asked.hint.verb, asked.hint.duration_s, session=named)
                if hint.verb is Verb.END:
                    self.leases.purged.update(dict.fromkeys(keys, self._inside.primary.step))
                self._answer(hint, receipt, request, keys, here)
                prefetches += self._open[len(prefetches) :]
                asked = None
            else:
                self._close(receipt)
        if asked is not None:
            self._complain(f"an operator's {asked.hint.verb.value} has none")
        self._learn(prefetches)
        self.leases.reclaim({prefetch.tenant for prefetch in prefetches}, ())
        self.leases.settle()
        self._check_loads(before)

    def reset(self) -> None:
        self.withheld.clear()
        self._of_ended.clear()
        self.leases.reset()

    def reset_ended(self) -> None:
        self.leases.reset_ended()
        for receipt in self._take():
            self._close(receipt)

    def check(self) -> None:
        self.leases.check()
        if len(self._open) != self._inside.prefetches:
            self._complain(f"{len(self._open)} prefetches lack one, not {self._inside.prefetches}")

    # --- receipts -----------------------------------------------------------------------------

    def _take(self) -> list[Receipt]:
        receipts = self._manager.take_receipts()
        for receipt in receipts:
            self._counts[f"hint {receipt.verb.value}: {receipt.outcome.value}"] += 1
            self._note("receipt:", receipt)
        return receipts

    def _complain(self, message: str) -> None:
        self._breach("each hint has its receipts", message)

    def _answer(
        self,
        hint: Hint,
        receipt: Receipt,
        request: RequestContext,
        keys: Sequence[OffloadKey],
        here: Sequence[OffloadKey],
    ) -> None:
        session = hint.session or request.session
        said = receipt.verb, receipt.request_id, receipt.session, receipt.tenant
        if said != (hint.verb, request.request_id, session, request.tenant):
            self._complain(f"{receipt} for {hint}")
        owner = request.session or request.request_id
        verb, outcome = hint.verb, receipt.outcome
        if verb is Verb.PREFETCH and outcome is Outcome.DEFERRED:
            wait_s = 0.0 if hint.session else request.resume_in_s or 0.0
            until_s = self._clock.now_s() + wait_s + _PREFETCH_S
            if hint.session:
                keys = self._sessions[request.tenant, session]
            whose = hint.session or owner
            self._open.append(
                _Prefetch(request.request_id, request.tenant, session, whose, keys, until_s)
            )
        elif outcome is Outcome.DEFERRED or outcome is Outcome.EXPIRED:
            self._complain(str(receipt))
        elif verb in (Verb.PIN, Verb.RETAIN) and (keys or not hint.duration_s):
            self._answer_lease(hint, receipt, request, keys, here)
        elif verb in (Verb.DEMOTE, Verb.END) and outcome is Outcome.ACCEPTED:
            for its in (owner, f"{owner} prefetch"):
                self.leases.end(self.leases.of(request.tenant, its))
            if verb is Verb.END:
                self._sessions.pop((request.tenant, request.session), None)

    def _answer_lease(
        self,
        hint: Hint,
        receipt: Receipt,
        request: RequestContext,
        keys: Sequence[OffloadKey],
        here: Sequence[OffloadKey],
    ) -> None:
        tenant, owner = request.tenant, request.session or request.request_id
        if not hint.duration_s:
            is_pin = hint.verb is Verb.PIN
            released = [
                key
                for key in self.leases.of(tenant, owner)
                if (self.leases.held[key].rank == inf) is is_pin
            ]
            self.leases.end(released)
            if len(released) != receipt.chunks:
                self._complain(f"{receipt}, and {len(released)} were held")
            return
        if receipt.outcome is Outcome.REFUSED and not request.request_id and not receipt.duration_s:
            return  # the manager has forgotten the session
        if hint.tokens is not None:
            keys = within(keys, hint.tokens, self._groups, TOKENS)
        present = set(here)
        wanted = [key for key in keys if key in present]
        duration_s = min(hint.duration_s, self._longest_s)
        is_pin = hint.verb is Verb.PIN
        priority = request.priority if hint.priority is None else hint.priority
        terms = Terms(
            tenant,
            owner,
            self._clock.now_s() + duration_s,
            duration_s if is_pin else 0.0,
            inf if is_pin else priority,
        )
        is_whole = receipt.chunks == len(keys) and duration_s == hint.duration_s
        expected = Outcome.ACCEPTED if is_whole else Outcome.CLIPPED
        if receipt.outcome is not (expected if receipt.chunks else Outcome.REFUSED):
            self._complain(f"{receipt} for {hint} of {len(keys)} chunks")
        self.leases.reclaim({tenant}, wanted)
        self.leases.grant(wanted[: receipt.chunks], terms)
        if receipt.chunks < len(wanted):
            self.leases.check_share(tenant, wanted)

    # --- prefetches ---------------------------------------------------------------------------

    def _close(self, receipt: Receipt) -> None:
        who = receipt.request_id, receipt.tenant, receipt.session
        for prefetch in self._open:
            if (prefetch.request_id, prefetch.tenant, prefetch.session) == who:
                break
        else:
            self._complain(f"nothing waits for {receipt}")
            return
        self._open.remove(prefetch)
        chunks, wanted = receipt.chunks, len(prefetch.keys)
        expected = Outcome.ACCEPTED if chunks == wanted else Outcome.CLIPPED
        if receipt.outcome not in (expected if chunks else Outcome.REFUSED, Outcome.EXPIRED):
            self._complain(f"{receipt}, of {wanted}")

    def _learn(self, prefetches: Sequence[_Prefetch]) -> None:
        """Record the leases that the manager has granted to ``prefetches``."""
        for key, (tenant, owner, until_s) in self._inside.leases().items():
            terms = Terms(tenant, owner, until_s, 0.0, DEFAULT_PRIORITY)
            old = self.leases.held.get(key)
            for prefetch in prefetches:
                may = prefetch.tenant, prefetch.owner + " prefetch", prefetch.until_s
                if may == (tenant, owner, until_s) and key in prefetch.keys and old != terms:
                    self.leases.grant([key], terms)
                    break

    def _prefetch_loads(self) -> set[tuple[str, int]]:
        return {
            (ledger.name, job.job_id)
            for ledger in self._ledgers
            for job in ledger.pending.values()
            if job.operation is Operation.LOAD and job.request.request_id.startswith(_PREFETCH)
        }

    def _check_loads(self, before: set[tuple[str, int]]) -> None:
        new = self._prefetch_loads() - before
        in_flight: dict[str, set[OffloadKey]] = {}
        others = []
        for ledger in self._ledgers:
            for job in ledger.pending.values():
                name = job.request.request_id
                if job.operation is Operation.LOAD and name.startswith(_PREFETCH):
                    in_flight.setdefault(name, set()).update(job.keys)
                elif job.operation is Operation.LOAD:
                    others.append(f"{ledger.name} {job.job_id} for {name}")
        if new and others:
            self._breach("a prefetch waits for loads", f"{sorted(new)} began beside {others}")
        for name, key, _ in self._inside.claims():
            if name.startswith(_PREFETCH):
                in_flight.setdefault(name, set()).add(key)
        for name, keys in in_flight.items():
            self._counts["chunks of prefetches in flight"] += len(keys)
            if len(keys) > self._window:
                self._breach("a prefetch loads few chunks at once", f"{name}: {len(keys)}")
