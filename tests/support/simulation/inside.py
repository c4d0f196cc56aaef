"""Access to the manager's private tables, for the other modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvtier_sdk.core_form import IS_COMPILED
from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.tiering.cascade import ManagedTier
from kvtier_sdk.tiering.manager import TieringManager
from kvtier_sdk.tiering.records import PendingLookup, Slot
from kvtier_sdk.tiering.slots import PrimaryTier
from kvtier_sdk.types import OffloadKey
from support.simulation.ledger import Transfer


class Inside:
    def __init__(self, manager: TieringManager) -> None:
        self._manager = manager
        self.primary: PrimaryTier = manager._primary

    @property
    def tiers(self) -> list[ManagedTier]:
        return self._manager._tiers

    @property
    def chunk_bytes(self) -> int:
        return self._manager._pool.chunk_bytes

    @property
    def free(self) -> list[Slot]:
        return self.primary._free

    @property
    def requests(self) -> list[str]:
        return list(self._manager._requests)

    @property
    def promotions(self) -> int:
        return self._manager._promotions._occupied

    @property
    def stale_copies(self) -> list[Slot]:
        return self._manager._stale_copies

    @property
    def prefetches(self) -> int:
        return len(self._manager._hints._prefetcher.waiting)

    def leases(self) -> dict[OffloadKey, tuple[str, str, float]]:
        leases = self.primary.leases
        ends_s = leases._until_s
        return {
            key: (its.tenant, its.owner + " prefetch" * its.is_prefetch, ends_s[its.tenant][key])
            for key, its in leases.held.items()
        }

    def named(self, request_id: str) -> list[OffloadKey]:
        return list(self._manager._requests[request_id].named or ())

    def asked(self, request_id: str, key: OffloadKey) -> PendingLookup | None:
        return self._manager._requests[request_id].asked.get(key)

    def missed(self, request_id: str) -> set[OffloadKey]:
        return self._manager._requests[request_id].missed

    def sent(self, tier: ManagedTier) -> Iterator[OffloadKey]:
        """Yield the chunks in the primary tier that the manager has sent to a tier."""
        for key, slot in self.primary.by_key.items():
            if slot.offers is not None and slot.offers.sent & tier.bit:
                yield key

    def count_offers_again(self) -> Counter[ManagedTier]:
        """Count the chunks offered again to each tier. With a compiled core the count stays 0."""
        cascade = self._manager._cascade
        take_failed = cascade._take_failed
        counts: Counter[ManagedTier] = Counter()
        if IS_COMPILED:
            return counts

        def count(tier: ManagedTier, slots: Sequence[Slot]) -> list[Slot]:
            failed = take_failed(tier, slots)
            counts[tier] += len(failed)
            return failed

        cascade._take_failed = count  # type: ignore[method-assign]
        return counts

    def watch_admission(
        self, tier: ManagedTier, on_refused: Callable[[set[OffloadKey]], None]
    ) -> None:
        """Call ``on_refused`` with the chunks that the admission policy keeps out of a tier."""
        choose = tier.admission.choose

        def watched(slots: Sequence[Slot]) -> tuple[Sequence[Slot], Sequence[Slot]]:
            chosen, others = choose(slots)
            on_refused({slot.key for slot in others})
            return chosen, others

        tier.admission.choose = watched  # type: ignore[method-assign]

    def claims(self) -> Iterator[tuple[str, OffloadKey, Slot]]:
        for request_id, state in self._manager._requests.items():
            for key, slot in state.claims.items():
                yield request_id, key, slot

    @staticmethod
    def collected(tier: ManagedTier) -> Iterator[Transfer]:
        """Yield the chunks of loads and stores that wait for the end of the step."""
        for job in tier.client._collected:
            if job.operation in (Operation.LOAD, Operation.STORE):
                for key, slot in zip(job.keys, job.slots, strict=True):
                    yield Transfer(job.operation, key, slot, True)

    @staticmethod
    def running(tier: ManagedTier) -> dict[int, Job]:
        return tier.client.jobs._running

    @staticmethod
    def quarantined(tier: ManagedTier) -> dict[int, Job]:
        return tier.client.jobs._quarantined

    @property
    def open_lookups(self) -> dict[OffloadKey, PendingLookup]:
        return self._manager._search.lookups.open

    @property
    def new_lookups(self) -> list[PendingLookup]:
        return self._manager._search.lookups.new

    @property
    def chunks_looked_up(self) -> int:
        return self._manager._search.lookups.waiting_chunks

    @property
    def lookups_full(self) -> bool:
        return self._manager._search.lookups.is_full

    def limit_lookups(self, chunks: int) -> None:
        self._manager._search.lookups.limit = chunks

    def offered(self) -> Iterator[Slot]:
        for slot in self.primary.slots:
            if slot.offers is not None and slot.offers.followers:
                yield slot
