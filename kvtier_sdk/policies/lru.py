"""Eviction of the least recently used chunk."""

from __future__ import annotations

from kvtier_sdk.policies.fifo import FIFOPolicy
from kvtier_sdk.types import OffloadKey


class LRUPolicy(FIFOPolicy):
    """Evicts the least recently used chunk: a queue in which a used chunk moves to the end."""

    def on_access(self, key: OffloadKey) -> None:
        self._order.move_to_end(key)
