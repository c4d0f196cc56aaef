"""The narrow door through which the simulation reads the manager's own tables."""

from __future__ import annotations

from collections.abc import Iterator

from kvtier_sdk.runner.jobs import Job, Operation
from kvtier_sdk.tiering import TieringManager
from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.slots import PrimaryTier, Slot
from kvtier_sdk.tiering.tier_port import TierPort
from kvtier_sdk.types import OffloadKey
from support.simulation.ledger import Transfer


class Inside:
    """Reads, and changes nothing. What is private to the manager is named here and nowhere else.

    Args:
        manager: whose tables.
    """

    def __init__(self, manager: TieringManager) -> None:
        self._manager = manager
        self.primary: PrimaryTier = manager._primary

    @property
    def ports(self) -> list[TierPort]:
        """The tiers, in order."""
        return self._manager._ports

    @property
    def chunk_bytes(self) -> int:
        """Payload of a slot."""
        return self._manager._pool.chunk_bytes

    @property
    def free(self) -> list[Slot]:
        """The free list."""
        return self.primary._free

    @property
    def requests(self) -> list[str]:
        """Ids of the requests that the manager remembers."""
        return list(self._manager._requests)

    @property
    def promotions(self) -> int:
        """How many they do, by the manager's own count."""
        return self._manager._promotions._occupied

    @property
    def stale_copies(self) -> list[Slot]:
        """Slots that copies of before a reset may still touch, by the manager's own list."""
        return self._manager._stale_copies

    @property
    def evicted(self) -> list[OffloadKey] | None:
        """What was evicted for the store that is being prepared."""
        return self._manager._evicted

    def asked(self, request_id: str, key: OffloadKey) -> PendingLookup | None:
        """The question that a request awaits the answer to, for a chunk."""
        return self._manager._requests[request_id].asked.get(key)

    def sent(self, port: TierPort) -> Iterator[OffloadKey]:
        """Readable chunks that a tier is taken to have or to be getting."""
        for key, slot in self.primary.by_key.items():
            if slot.offers is not None and slot.offers.sent & port.bit:
                yield key

    def claims(self) -> Iterator[tuple[str, OffloadKey, Slot]]:
        """Chunks that requests hold because they were promoted for them."""
        for request_id, state in self._manager._requests.items():
            for key, slot in state.claims.items():
                yield request_id, key, slot

    def collected(self, port: TierPort) -> Iterator[Transfer]:
        """Loads and stores that were not handed over yet."""
        for operation, batches in (
            (Operation.LOAD, list(port._loads.values())),
            (Operation.STORE, port._stores),
        ):
            for batch in batches:
                for key, slot in zip(batch.keys, batch.slots, strict=True):
                    yield Transfer(operation, key, slot, True)

    @staticmethod
    def running(port: TierPort) -> dict[int, Job]:
        """Jobs that the manager takes to be without a result."""
        return port.jobs._running

    @staticmethod
    def quarantined(port: TierPort) -> dict[int, Job]:
        """Jobs that it takes to have a result, and I/O that goes on."""
        return port.jobs._quarantined

    @property
    def open_questions(self) -> dict[OffloadKey, PendingLookup]:
        """The question of each chunk that is being asked for."""
        return self._manager._questions.open

    @property
    def new_questions(self) -> list[PendingLookup]:
        """Questions that no tier has been asked yet."""
        return self._manager._questions._new

    @property
    def questions_by_job(self) -> dict[int, PendingLookup]:
        """The question that each lookup job answers."""
        return self._manager._questions._by_job

    def offered(self) -> Iterator[Slot]:
        """Slots of which something is still to go to a tier as soon as they are readable."""
        for slot in self.primary.slots:
            if slot.offers is not None and slot.offers.followers:
                yield slot
