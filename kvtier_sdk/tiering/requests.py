"""The manager's memory of a request while it is alive, and the pins that it holds."""

from __future__ import annotations

from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.prefix_order import NameOrder, PrefixOrder
from kvtier_sdk.tiering.slots import Slot
from kvtier_sdk.tiering.waits import Wait
from kvtier_sdk.types import OffloadKey, RequestContext


class RequestState:
    """One request. A plain record; everything in it goes when the request goes.

    Attributes:
        context: as the engine gave it.
        asked: the pending lookup of each chunk. Its answers never outlive the request.
        asking: the pending lookup that this step's new chunks are added to.
        known: the chunks of this step that are loaded without a lookup.
        asks_first: true if no more chunks are: there was no room for one.
        claims: slots of chunks that are promoted for the request, pinned until it uses them or
            ends.
        copies: slots that are being copied to the device, by key; twice where there are two.
        writes: slots that the device is writing, by key, in prefix order.
        prefix_order: the order of the request's chunks, where the policy or a trace needs it.
        arrived_s: when it arrived, where a trace is recorded.
        tiers: mask of the tiers that may be asked for it; -1 for all.
        turn: the step in which its lookups may begin.
        wait: what its lookups were last found to wait for.
        missed: the chunks whose miss was counted, so that each is counted once.
        finished: true once the engine is done with it; completions may still arrive.
    """

    __slots__ = (
        "arrived_s",
        "asked",
        "asking",
        "asks_first",
        "claims",
        "context",
        "copies",
        "finished",
        "known",
        "missed",
        "prefix_order",
        "tiers",
        "turn",
        "wait",
        "writes",
    )

    def __init__(
        self,
        context: RequestContext,
        prefix_order: PrefixOrder | NameOrder | None,
        *,
        tiers: int = -1,
        arrived_s: float = 0.0,
    ) -> None:
        self.context = context
        self.tiers = tiers
        self.turn = -1
        self.asked: dict[OffloadKey, PendingLookup] = {}
        self.asking: PendingLookup | None = None
        self.known: PendingLookup | None = None
        self.asks_first = False
        self.claims: dict[OffloadKey, Slot] = {}
        self.copies: dict[OffloadKey, list[Slot]] = {}
        self.writes: dict[OffloadKey, Slot] = {}
        self.prefix_order = prefix_order
        self.arrived_s = arrived_s
        self.wait: Wait | None = None
        self.missed: set[OffloadKey] = set()
        self.finished = False

    @property
    def over(self) -> bool:
        """True if nothing of the request is left to wait for."""
        return self.finished and not self.copies and not self.writes

    def wait_in(self, step: int) -> Wait:
        """Return the wait for what this step's lookups find pending."""
        if self.wait is None or self.wait.step != step:
            self.wait = Wait(step)
        return self.wait

    def forget_answers(self) -> None:
        """Forget what the tiers have said so far."""
        self.asked.clear()
        self.asking = None
        self.wait = None
        self.known = None
        self.asks_first = False
