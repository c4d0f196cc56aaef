"""Loads chunks into the primary tier before a request needs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Final

from kvtier_sdk.tiering.records import RequestState, SlotState
from kvtier_sdk.tiering.search import TierSearch
from kvtier_sdk.types import GROUP_BYTES, LookupResult, OffloadKey, RequestContext

_WINDOW: Final = 64  # the most chunks to load at once; another request may have to wait for them
_MOST_WAITING: Final = 256  # the most prefetches that wait
_LEAD_S: Final = 1.0  # begin this long, plus twice the expected load time, before the turn
_WINDOW_S: Final = 0.1  # begin this much earlier for each window


@dataclass(eq=False)
class Prefetch:
    """A session's chunks to load before its next turn, which is expected at ``turn_s``."""

    request: RequestContext  # the request with the hint
    keys: Sequence[OffloadKey]  # the chunks that a tier may have, in prefix order
    tiers: int
    turn_s: float
    until_s: float
    wanted: int  # the initial length of ``keys``, which may lose missing chunks
    place: int = 0  # the number of leading chunks that are in the primary tier
    loading: RequestState | None = None  # the internal request that loads the chunks

    def forget_from(self, missing: OffloadKey) -> None:
        """Forget a chunk that no tier has, and its group's later chunks, which are useless then."""
        group = missing[-GROUP_BYTES:]
        at = self.keys.index(missing, self.place)
        rest = [key for key in self.keys[at:] if key[-GROUP_BYTES:] != group]
        self.keys = [*self.keys[:at], *rest]


@dataclass(eq=False)
class Prefetcher:
    """Loads one window of chunks at a time, and only while no other loads are queued."""

    _search: TierSearch
    # Leases loaded chunks, and returns the number of leases. A missing lease ends the prefetch.
    _arrived: Callable[[Prefetch, Sequence[OffloadKey]], int]
    # Receives a prefetch that has ended, and the reason if the prefetch was given up.
    _ended: Callable[[Prefetch, str], None]
    _end_request: Callable[[RequestState], None]
    waiting: list[Prefetch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._numbers = count(1)
        self._window = max(1, min(_WINDOW, len(self._search.primary.slots) // 16))

    @property
    def is_due(self) -> bool:
        return any(self._is_due(prefetch) for prefetch in self.waiting)

    def add(self, prefetch: Prefetch) -> bool:
        """Queue a prefetch; return false if too many prefetches of the tenant already wait."""
        tenants = [other.request.tenant for other in self.waiting]
        own = tenants.count(prefetch.request.tenant)
        if len(tenants) >= _MOST_WAITING:
            # Drop a prefetch of the tenant with the most prefetches, if that tenant has at least
            # two more than this tenant.
            most = max(set(tenants), key=tenants.count)
            if own + 1 >= tenants.count(most):
                return False
            last = next(p for p in reversed(self.waiting) if p.request.tenant == most)
            self.end(last, "too many prefetches wait, and other tenants have fewer")
        self.waiting.append(prefetch)
        self.waiting.sort(key=attrgetter("turn_s"))
        return True

    def step(self) -> None:
        now_s = self._search.primary.now_s
        for prefetch in list(self.waiting):
            if now_s > prefetch.until_s:
                self.end(prefetch, "its time went by")
            elif self._is_due(prefetch):
                self._carry_on(prefetch)
                return

    def drop(self, tenant: str, session: str) -> None:
        for prefetch in list(self.waiting):
            request = prefetch.request
            if (request.tenant, request.session) == (tenant, session):
                self.end(prefetch, "the turn came first")

    def end(self, prefetch: Prefetch, given_up: str = "") -> None:
        self.waiting.remove(prefetch)
        state = prefetch.loading
        if state is not None:
            self._search.promotions.abandon(state)
            state.finished = True
            self._end_request(state)
        self._ended(prefetch, given_up)

    def _is_due(self, prefetch: Prefetch) -> bool:
        if prefetch.loading is not None:
            # A started prefetch already pins chunks, so do not postpone the rest.
            return True
        chunks = len(prefetch.keys)
        loads_s = [tier.client.expected_load_s(chunks) for tier in self._search.tiers]
        load_s = max(loads_s, default=0.0)
        lead_s = _LEAD_S + 2 * load_s + _WINDOW_S * (chunks // self._window)
        return self._search.primary.now_s >= prefetch.turn_s - lead_s

    def _carry_on(self, prefetch: Prefetch) -> None:
        if self._is_loading():
            return
        state = prefetch.loading
        if state is None:
            state = prefetch.loading = self._begin(prefetch)
        window = prefetch.keys[prefetch.place : prefetch.place + self._window]
        if self._look_up(prefetch, window, state):
            return
        kept = self._arrived(prefetch, window)
        self._search.promotions.abandon(state)
        state.forget_answers()
        prefetch.place += kept
        if kept < len(window) or prefetch.place == len(prefetch.keys):
            self.end(prefetch)

    def _is_loading(self) -> bool:
        """Return true if loads are queued or running, or will start when this step ends."""
        if any(pending.is_known for pending in self._search.lookups.new):
            return True
        return any(tier.client.load_bytes for tier in self._search.tiers)

    def _begin(self, prefetch: Prefetch) -> RequestState:
        request = prefetch.request
        wait_s = max(0.0, prefetch.turn_s - self._search.primary.now_s)
        context = RequestContext(
            f"kvtier prefetch {next(self._numbers)}",
            resume_in_s=wait_s,
            session=request.session,
            tenant=request.tenant,
        )
        state = RequestState(context, None, prefetch.tiers, is_prefetch=True)
        self._search.requests[context.request_id] = state
        return state

    def _look_up(self, prefetch: Prefetch, keys: Sequence[OffloadKey], state: RequestState) -> bool:
        """Look up chunks; return false if all chunks are in the primary tier."""
        pending = False
        for key in keys:
            slot = self._search.primary.by_key.get(key)
            if slot is None:
                if self._search.find(key, state) is LookupResult.MISS:
                    prefetch.forget_from(key)
                    return True
                pending = True
            elif slot.state is SlotState.LOADING:
                if key not in state.claims:
                    self._search.promotions.join(slot, state)
                pending = True
        return pending
