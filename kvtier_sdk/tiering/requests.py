"""What the manager remembers of a request while it is alive, and who holds which pin."""

from __future__ import annotations

from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.prefix_order import PrefixOrder
from kvtier_sdk.tiering.slots import Slot
from kvtier_sdk.types import OffloadKey, RequestContext


class RequestState:
    """One request. A plain record; everything in it goes when the request goes.

    Attributes:
        context: as the engine gave it.
        asked: the question that was put to the tiers about each chunk. Its answers never outlive
            the request that asked.
        asking: the question that this step's new chunks are added to.
        claims: chunks that are promoted for the request, or were and are pinned until it uses
            them or ends.
        copies: slots that are being copied to the device, by key; twice where there are two.
        writes: slots that the device is writing, by key, in prefix order.
        lineage: the order of the request's chunks, where somebody wants to know it.
        tiers: mask of the tiers that may be asked for it; -1 for all.
        missed: the chunk whose miss was counted last, so that it is counted once.
        finished: the engine is done with it; completions may still arrive.
    """

    __slots__ = (
        "asked",
        "asking",
        "claims",
        "context",
        "copies",
        "finished",
        "missed",
        "prefix_order",
        "tiers",
        "writes",
    )

    def __init__(self, context: RequestContext, *, learns_order: bool, tiers: int = -1) -> None:
        self.context = context
        self.tiers = tiers
        self.asked: dict[OffloadKey, PendingLookup] = {}
        self.asking: PendingLookup | None = None
        self.claims: dict[OffloadKey, Slot] = {}
        self.copies: dict[OffloadKey, list[Slot]] = {}
        self.writes: dict[OffloadKey, Slot] = {}
        self.prefix_order = PrefixOrder() if learns_order else None
        self.missed: OffloadKey | None = None
        self.finished = False

    @property
    def over(self) -> bool:
        """Whether nothing of the request is left to wait for."""
        return self.finished and not self.copies and not self.writes

    def forget_answers(self) -> None:
        """What the tiers have said so far no longer counts."""
        self.asked.clear()
        self.asking = None
