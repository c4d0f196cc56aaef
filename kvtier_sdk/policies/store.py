"""The SDK's store policies, which choose when a chunk is sent to a tier."""

from __future__ import annotations

from kvtier_sdk.contract import StoreMoment, StorePolicy
from kvtier_sdk.types import OffloadKey, RequestContext


class Through(StorePolicy):
    """Stores every chunk as soon as the device has written it."""

    moment = StoreMoment.STORED
    filters = False

    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        return True


class OnEvict(Through):
    """Stores every chunk just before its eviction from the primary tier (spill)."""

    moment = StoreMoment.EVICTED


class AfterHits(StorePolicy):
    """Stores a chunk after N hits, for the policy ``after_hits:N``."""

    moment = StoreMoment.HIT

    def __init__(self, argument: str | None) -> None:
        if argument is None or not argument.isdecimal() or int(argument) < 1:
            raise ValueError("needs a number of hits from 1: 'after_hits:2'")
        super().__init__(None)
        self._hits = int(argument)

    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        return hits >= self._hits


class OfTenant(StorePolicy):
    """Stores the chunks of one tenant's requests, for the policy ``of_tenant:TENANT``."""

    moment = StoreMoment.STORED

    def __init__(self, argument: str | None) -> None:
        if not argument:
            raise ValueError("needs a tenant: 'of_tenant:acme'")
        super().__init__(None)
        self._tenant = argument

    def wants(self, key: OffloadKey, hits: int, request: RequestContext) -> bool:
        return request.tenant == self._tenant
