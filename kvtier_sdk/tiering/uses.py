"""Collects the uses of chunks in a step, and reports them to the policy and the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.tiering.records import RequestState
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey, RequestContext

#: Limits the distinct reasons for the end of an answer, because clients can invent reasons.
_MOST_STOPS: Final = 64


@dataclass(eq=False)
class Uses:
    """The chunks that were used in one step, and the requests that ended in this step."""

    _primary: PrimaryTier
    _policy: EvictionPolicy
    _tiers: Sequence[ManagedTier]
    _requests: Mapping[str, RequestState]
    # Each used chunk, with the request that used it last.
    _touched: dict[OffloadKey, RequestContext] = field(default_factory=dict)
    _over: dict[str, tuple[RequestContext, str | None]] = field(default_factory=dict)
    _stops: set[str] = field(default_factory=set)

    def note(self, keys: Iterable[OffloadKey], request: RequestContext) -> None:
        self._touched.update(dict.fromkeys(keys, request))

    def note_end(self, request: RequestContext, stop: str | None) -> None:
        if stop is not None and stop not in self._stops and len(self._stops) < _MOST_STOPS:
            self._stops.add(stop)
        self._over[request.request_id] = request, stop if stop in self._stops else None

    def note_if_over(self, request: RequestContext) -> None:
        """Report a request's end again if the policy saw a use after the end."""
        if request.request_id not in self._requests and request.request_id not in self._over:
            self._over[request.request_id] = request, None

    def tell(self) -> None:
        if self._touched:
            # Omit chunks that no later turn needs, because tiers need not keep them.
            touched = [key for key, request in self._touched.items() if not request.is_over]
            for _, uses in groupby(self._touched.items(), lambda use: id(use[1])):
                (first, request), *others = uses
                self._primary.access([first, *(key for key, _ in others)], request)
                self.note_if_over(request)
            self._touched = {}
            # Reverse the order, so that tiers evict the start of a prefix last.
            touched.reverse()
            for tier in self._tiers:
                tier.client.touch(touched)
        self.tell_ends()

    def tell_ends(self) -> None:
        for request, stop in self._over.values():
            self._policy.on_request_finished(request, stop)
        self._over = {}

    def forget(self) -> None:
        self._touched.clear()
