"""Eviction of the least recently used chunk."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.types import OffloadKey, RequestContext


class LRUPolicy(EvictionPolicy):
    """Evicts the least recently used chunk."""

    def __init__(self) -> None:
        # A plain dict would be slow, because iterating it skips all deleted entries at the front.
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        self._order.update(dict.fromkeys(reversed(keys)))

    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        for key in reversed(keys):
            self._order.move_to_end(key)

    def on_remove(self, key: OffloadKey) -> None:
        del self._order[key]

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        return list(islice(filter(is_evictable, self._order), count))
