"""Least recently used first."""

from __future__ import annotations

from kvtier_sdk.policies.fifo import FIFOPolicy
from kvtier_sdk.types import OffloadKey


class LRUPolicy(FIFOPolicy):
    """Evicts the chunk whose last use is the longest ago: a queue whose used ones line up anew."""

    def on_access(self, key: OffloadKey) -> None:
        self._order.move_to_end(key)
