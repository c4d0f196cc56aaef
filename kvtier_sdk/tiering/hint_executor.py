"""Carries out callers' and operators' hints: leases, prefetches and ends of sessions."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.events import PRIMARY
from kvtier_sdk.hints import DEFAULT_PRIORITY, Hint, Outcome, Receipt, Verb
from kvtier_sdk.options.units import format_seconds
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.tiering.leases import Lease
from kvtier_sdk.tiering.prefetcher import Prefetch, Prefetcher
from kvtier_sdk.tiering.records import RequestState
from kvtier_sdk.tiering.search import TierSearch
from kvtier_sdk.types import GROUP_BYTES, OffloadKey, RequestContext

_MOST_RECEIPTS: Final = 1024  # the most receipts to keep until the engine takes them
_REMEMBERED: Final = 16  # session chunks to remember, per slot
_NAMES: Final = 8  # a session's and a tenant's name take as much memory as this many keys
_PREFETCH_S: Final = 60.0  # from the expected turn to the end of a prefetch and of its leases


@dataclass(eq=False)
class OperatorHint:
    """An operator's hint for a session.

    Attributes:
        hint: the hint to carry out.
        session: the session to which the hint applies.
        tenant: the session's tenant.
        receipt: the latest receipt; ``None`` until the engine's next step.
    """

    hint: Hint
    session: str
    tenant: str
    receipt: Receipt | None = None


class _Sessions:
    """The chunks of each session's last request. Beyond a limit, old sessions are forgotten."""

    def __init__(self, most_chunks: int) -> None:
        self._most_chunks = most_chunks
        self._chunks = 0
        self._sessions: dict[tuple[str, str], Sequence[OffloadKey]] = {}
        self._uses: Counter[OffloadKey] = Counter()

    def note(self, tenant: str, session: str, keys: Sequence[OffloadKey]) -> None:
        self.forget(tenant, session)
        self._sessions[tenant, session] = keys
        self._uses.update(keys)
        self._chunks += len(keys) + _NAMES
        while self._chunks > self._most_chunks:
            self.forget(*next(iter(self._sessions)))

    def chunks(self, tenant: str, session: str) -> Sequence[OffloadKey]:
        return self._sessions.get((tenant, session), ())

    def own_chunks(self, tenant: str, session: str) -> Sequence[OffloadKey]:
        uses = self._uses
        return [key for key in self.chunks(tenant, session) if uses[key] == 1]

    def forget(self, tenant: str, session: str) -> None:
        keys = self._sessions.pop((tenant, session), None)
        if keys is None:
            return
        self._chunks -= len(keys) + _NAMES
        uses = self._uses
        for key in keys:
            if uses[key] > 1:
                uses[key] -= 1
            else:
                del uses[key]


class HintExecutor:
    """Carries out hints within the leases' budget, and writes their receipts."""

    def __init__(
        self, search: TierSearch, clock: Clock, end_request: Callable[[RequestState], None]
    ) -> None:
        self._primary = search.primary
        self._leases = search.primary.leases
        self._tiers = search.tiers
        self._clock = clock
        self.max_duration_s: float = inf  # of a lease, and of the wait for a prefetch's turn
        self._log = TierLog(PRIMARY, clock)
        self._sessions = _Sessions(_REMEMBERED * len(self._primary.slots))
        self._prefetcher = Prefetcher(
            search, self._keep_prefetched, self._note_prefetched, end_request
        )
        self.receipts: deque[Receipt] = deque(maxlen=_MOST_RECEIPTS)
        self.of_operator: deque[OperatorHint] = deque()  # any thread may append
        self._operator_prefetches: dict[Prefetch, OperatorHint] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.of_operator) or self._prefetcher.is_due

    def begin(self, request: RequestContext) -> None:
        """Cancel the prefetches of a request's session, because its next turn has come."""
        if request.session is not None and self._prefetcher.waiting:
            self._prefetcher.drop(request.tenant, request.session)

    def finish(self, state: RequestState, ends: Mapping[OffloadKey, int]) -> None:
        """Carry out an ended request's hints. The engine may leave ``ends`` empty."""
        request, named = state.context, state.named or {}
        keys = list(ends or named)
        # Skip the last chunks of the answer if the engine did not offload them.
        while named and keys[-1] not in named and keys[-1] not in self._primary.by_key:
            keys.pop()
        if self._leases.held:
            now_s = self._clock.now_s()
            # Leases normally expire when a step begins. Expire them now, before a use renews them.
            self._leases.expire(now_s)
            self._leases.renew(keys, now_s)
            self._leases.end(self._leases.prefetched(keys, request.tenant, _owner(request)))
        if request.session is not None and keys:
            self._sessions.note(request.tenant, request.session, keys)
        for hint in request.hints:
            self._carry_out(hint, request, keys, ends, state.tiers)

    def step(self) -> None:
        while self.of_operator:
            self._carry_out_for_operator(self.of_operator.popleft())
        if self._prefetcher.waiting:
            self._prefetcher.step()

    def reset(self) -> None:
        for prefetch in list(self._prefetcher.waiting):
            self._prefetcher.end(prefetch, "the pool was emptied")

    def _carry_out(
        self,
        hint: Hint,
        request: RequestContext,
        keys: Sequence[OffloadKey],
        ends: Mapping[OffloadKey, int],
        tiers: int = -1,
    ) -> None:
        verb = hint.verb
        if hint.mistake:
            self._refuse(hint, request, hint.mistake)
        elif verb is Verb.PIN or verb is Verb.RETAIN:
            if hint.tokens is not None and not ends:
                self._refuse(hint, request, "the engine does not say where chunks end")
                return
            wanted = keys if hint.tokens is None else list(_within(ends, hint.tokens))
            self._lease(hint, request, wanted)
        elif verb is Verb.PREFETCH:
            self._queue_prefetch(hint, request, keys, tiers)
        else:
            if verb is not Verb.RESUME_IN:
                self._leases.end(self._leases.of(request.tenant, _owner(request)))
            if verb is Verb.END:
                self._end_session(request)
            wait_s = request.resume_in_s if verb is Verb.RESUME_IN else None
            self._write(hint, request, Outcome.ACCEPTED, len(keys), wait_s)

    def _lease(self, hint: Hint, request: RequestContext, keys: Sequence[OffloadKey]) -> None:
        asked_s = hint.duration_s or 0.0
        is_pin = hint.verb is Verb.PIN
        if not asked_s:
            held = self._leases.held
            released = [
                key
                for key in self._leases.of(request.tenant, _owner(request))
                if not held[key].is_prefetch and (held[key].priority is None) is is_pin
            ]
            self._leases.end(released)
            self._write(hint, request, Outcome.ACCEPTED, len(released), 0.0)
            return
        duration_s = min(asked_s, self.max_duration_s)
        priority = request.priority if hint.priority is None else hint.priority
        lease = Lease(
            request.tenant,
            _owner(request),
            renewal_s=duration_s if is_pin else 0.0,
            priority=None if is_pin else priority,
        )
        here = [key for key in keys if key in self._primary.by_key]
        granted = self._leases.grant(here, lease, self._clock.now_s() + duration_s)
        reasons = []
        if len(here) < len(keys):
            reasons.append(f"{len(keys) - len(here):,} chunks are not in the pool")
        if granted < len(here):
            reasons.append(
                f"{len(here) - granted:,} chunks are over the budget of {self._leases.budget:,}"
            )
        if duration_s < asked_s:
            reasons.append(f"the longest is {format_seconds(duration_s)}")
        outcome = Outcome.CLIPPED if reasons else Outcome.ACCEPTED
        if not granted:
            outcome = Outcome.REFUSED
            reasons = reasons or ["it names no chunk"]
        self._write(hint, request, outcome, granted, duration_s, "; ".join(reasons))

    def _end_session(self, request: RequestContext) -> None:
        if request.session is None:
            return
        by_key = self._primary.by_key
        for key in self._sessions.own_chunks(request.tenant, request.session):
            slot = by_key.get(key)
            if slot is not None and slot.offers is not None:
                # No request will load these chunks, so no tier needs to store them.
                slot.offers.owed = 0
        self._sessions.forget(request.tenant, request.session)

    def _queue_prefetch(
        self, hint: Hint, request: RequestContext, keys: Sequence[OffloadKey], tiers: int = -1
    ) -> Prefetch | None:
        now_s = self._clock.now_s()
        wait_s = 0.0
        if hint.session is not None:
            keys = self._sessions.chunks(request.tenant, hint.session)
            # The next turn of the named session ends the prefetch, so use that session's name.
            request = RequestContext(
                request.request_id, session=hint.session, tenant=request.tenant
            )
        elif request.resume_in_s is not None and request.resume_in_s < inf:
            wait_s = request.resume_in_s
        else:
            self._refuse(hint, request, "it needs 'resume_in', the time of the next turn")
            return None
        if not keys:
            session = hint.session or request.session
            self._refuse(hint, request, f"no chunks of session {session!r} are known")
        elif not self._leases.budget:
            self._refuse(hint, request, "the budget is 0")
        elif not self._tiers:
            self._refuse(hint, request, "there is no tier to load from")
        elif wait_s > self.max_duration_s:
            longest = format_seconds(self.max_duration_s)
            self._refuse(hint, request, f"the latest turn is after {longest}")
        else:
            turn_s = now_s + wait_s
            prefetch = Prefetch(request, keys, tiers, turn_s, turn_s + _PREFETCH_S, len(keys))
            if self._prefetcher.add(prefetch):
                self._write(hint, request, Outcome.DEFERRED, len(keys), wait_s)
                return prefetch
            self._refuse(hint, request, "too many prefetches of this tenant wait")
        return None

    def _keep_prefetched(self, prefetch: Prefetch, keys: Sequence[OffloadKey]) -> int:
        request = prefetch.request
        lease = Lease(request.tenant, _owner(request), 0.0, DEFAULT_PRIORITY, is_prefetch=True)
        return self._leases.grant(keys, lease, prefetch.until_s)

    def _note_prefetched(self, prefetch: Prefetch, given_up: str) -> None:
        chunks, wanted = prefetch.place, prefetch.wanted
        outcome, reason = Outcome.ACCEPTED, ""
        if given_up:
            outcome, reason = Outcome.EXPIRED, given_up
        elif chunks < wanted:
            outcome = Outcome.CLIPPED if chunks else Outcome.REFUSED
            reason = f"{wanted - chunks:,} chunks are in no tier, or over the budget"
        self._write(Hint(Verb.PREFETCH), prefetch.request, outcome, chunks, reason=reason)
        asked = self._operator_prefetches.pop(prefetch, None)
        if asked is not None:
            asked.receipt = self.receipts[-1]

    def _carry_out_for_operator(self, asked: OperatorHint) -> None:
        hint, tenant, session = asked.hint, asked.tenant, asked.session
        request = RequestContext("", session=session, tenant=tenant)
        keys = self._sessions.chunks(tenant, session)
        if not keys:
            self._refuse(hint, request, f"no chunks of session {session!r} are known")
        elif hint.verb is Verb.PIN:
            self._lease(hint, request, keys)
        elif hint.verb is Verb.PREFETCH:
            prefetch = self._queue_prefetch(Hint(hint.verb, session=session), request, ())
            if prefetch is not None:
                self._operator_prefetches[prefetch] = asked
        else:
            own = self._sessions.own_chunks(tenant, session)
            self._prefetcher.drop(tenant, session)
            self._carry_out(Hint(Verb.END), request, own, {})
            self._primary.purge(own)
        asked.receipt = self.receipts[-1]

    def _refuse(self, hint: Hint, request: RequestContext, reason: str) -> None:
        self._write(hint, request, Outcome.REFUSED, reason=reason)

    def _write(
        self,
        hint: Hint,
        request: RequestContext,
        outcome: Outcome,
        chunks: int = 0,
        duration_s: float | None = None,
        reason: str = "",
    ) -> None:
        session = hint.session or request.session
        who = request.request_id, session, request.tenant
        receipt = Receipt(*who, hint.verb, outcome, chunks, duration_s, reason)
        self.receipts.append(receipt)
        topic = f"{hint.verb.value}.{outcome.value}"
        self._primary.stats.hints[topic] += 1
        self._log.often(logging.INFO, topic, f"{PRIMARY}: {receipt}")


def _owner(request: RequestContext) -> str:
    return request.session or request.request_id


def _within(ends: Mapping[OffloadKey, int], tokens: tuple[int, int]) -> Iterator[OffloadKey]:
    """Yield the chunks that have a token in the range ``tokens``."""
    first, stop = tokens
    begins: dict[bytes, int] = {}  # for each group, the start of its next chunk
    for key, end in ends.items():
        group = key[-GROUP_BYTES:]
        if end > first and begins.get(group, 0) < stop:
            yield key
        begins[group] = end
