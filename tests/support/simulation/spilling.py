"""Checks that no chunk is evicted before its stores into the ``on_evict`` tiers have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtier_sdk.contract import StoreMoment
from kvtier_sdk.core_form import IS_COMPILED
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.types import OffloadKey
from support.simulation.breach import short
from support.simulation.inside import Inside
from support.simulation.ledger import Ledger


class SpillRule:
    def __init__(self, on_breach: Callable[[str, str], None]) -> None:
        self.resetting = False  # a reset forgets chunks without an eviction
        self._breach = on_breach
        self._owed: list[tuple[ManagedTier, Ledger]] = []
        # For each tier, the chunks that may be evicted because the tier did not accept them.
        self._let_go: dict[str, set[OffloadKey]] = {}

    def watch(self, inside: Inside, ledgers: Sequence[Ledger]) -> None:
        """Choose the tiers to check. A compiled core cannot be patched, and is not checked."""
        if IS_COMPILED:
            return
        for tier, ledger in zip(inside.tiers, ledgers, strict=True):
            if tier.store_policy.moment is StoreMoment.EVICTED:
                self._owed.append((tier, ledger))
                self._let_go[ledger.name] = set()
                inside.watch_admission(tier, self._let_go[ledger.name].update)

    def arrived(self, key: OffloadKey) -> None:
        """Require that the tiers get a newly readable chunk before its eviction."""
        for _, ledger in self._owed:
            ledger.settled.discard(key)
            self._let_go[ledger.name].discard(key)

    def excuse(self, keys: Iterable[OffloadKey]) -> None:
        """Allow unneeded chunks to be evicted without a store."""
        keys = list(keys)
        for let_go in self._let_go.values():
            let_go.update(keys)

    def left(self, key: OffloadKey) -> None:
        if self.resetting:
            return
        for tier, ledger in self._owed:
            had = key in ledger.settled or ledger.found[key] or key in ledger.known
            if not had and tier.client.takes_stores and key not in self._let_go[ledger.name]:
                self._breach(
                    "what is owed to a tier stays until it had it",
                    f"{short(key)} was evicted, and {ledger.name} was not given it",
                )

    def step_ended(self, readable: set[OffloadKey]) -> None:
        for tier, ledger in self._owed:
            if not tier.client.takes_stores:
                self._let_go[ledger.name] |= readable
