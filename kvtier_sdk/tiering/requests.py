"""What the manager remembers of a request while it is alive, and who holds which pin."""

from __future__ import annotations

from kvtier_sdk.primary import Slot
from kvtier_sdk.tiering.lineage import Lineage
from kvtier_sdk.tiering.probes import Probe
from kvtier_sdk.types import OffloadKey, RequestContext


class RequestState:
    """One request. A plain record; everything in it goes when the request goes.

    Attributes:
        context: as the engine gave it.
        probes: what the tiers answered to this request, by key. A verdict never outlives the
            request that asked.
        pending: promotions that the request waits for, by key.
        holds: promoted chunks that are pinned until the request uses them or ends.
        loads: how many copies to the device each slot is pinned for, by key.
        writes: slots that the device is writing, by key, in prefix order.
        lineage: the order of the request's chunks.
        finished: the engine is done with it; completions may still arrive.
    """

    __slots__ = (
        "context",
        "finished",
        "holds",
        "lineage",
        "loads",
        "pending",
        "probes",
        "writes",
    )

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.probes: dict[OffloadKey, Probe] = {}
        self.pending: dict[OffloadKey, Slot] = {}
        self.holds: dict[OffloadKey, Slot] = {}
        self.loads: dict[OffloadKey, int] = {}
        self.writes: dict[OffloadKey, Slot] = {}
        self.lineage = Lineage()
        self.finished = False

    @property
    def over(self) -> bool:
        """Whether nothing of the request is left to wait for."""
        return self.finished and not self.loads and not self.writes
