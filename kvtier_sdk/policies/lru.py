"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.types import OffloadKey, RequestContext


class LRUPolicy(EvictionPolicy):
    """Evicts the chunk whose last use is the longest ago."""

    uses_prefix = False

    def __init__(self) -> None:
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def on_insert(
        self, key: OffloadKey, parent: OffloadKey | None, position: int, request: RequestContext
    ) -> None:
        self._order[key] = None

    def on_access(self, key: OffloadKey) -> None:
        self._order.move_to_end(key)

    def on_remove(self, key: OffloadKey) -> None:
        del self._order[key]

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        victims: list[OffloadKey] = []
        for key in self._order:
            if len(victims) == count:
                break
            if is_evictable(key):
                victims.append(key)
        return victims
