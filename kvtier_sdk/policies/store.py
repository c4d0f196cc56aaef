"""Which chunks a tier is given, and when: the store policies that come with the SDK."""

from __future__ import annotations

from kvtier_sdk.contract import StoreMoment, StorePolicy
from kvtier_sdk.types import OffloadKey, RequestContext


class Through(StorePolicy):
    """Every chunk, as soon as the device has written it."""

    moment = StoreMoment.STORED
    filters = False

    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        return True


class OnEvict(StorePolicy):
    """Every chunk that leaves the primary tier, before it does: the tier takes what spills over."""

    moment = StoreMoment.EVICTED
    filters = False

    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        return True


class AfterHits(StorePolicy):
    """``after_hits:2``: a chunk that has come back from the primary tier that often."""

    moment = StoreMoment.HIT

    def __init__(self, argument: str | None) -> None:
        if argument is None or not argument.isdecimal() or int(argument) < 1:
            raise ValueError("needs a number of hits from 1: 'after_hits:2'")
        super().__init__(None)
        self._hits = int(argument)

    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        return hits >= self._hits
