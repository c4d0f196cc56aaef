"""One of the manager's tiers: its client, its place in the order, and the choice of its chunks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvtier_sdk.contract import StoreMoment, StorePolicy
from kvtier_sdk.tiering.admission import Admission
from kvtier_sdk.tiering.tier_client import TierClient


@dataclass(eq=False, slots=True)
class ManagedTier:
    """A secondary tier in the manager's order.

    Attributes:
        client: the tier's client.
        index: its place in the order in which tiers are asked.
        store_policy: decides which chunks it gets.
        whole_requests: true if it gets all chunks of a request.
        admission: withholds chunks that the tier would evict before they are read.
        bit: ``1 << index``, its place in masks of tiers.
    """

    client: TierClient
    index: int
    store_policy: StorePolicy
    whole_requests: bool = field(init=False)
    admission: Admission = field(init=False)
    bit: int = field(init=False)

    def __post_init__(self) -> None:
        client, options = self.client, self.client.spec.runner
        self.whole_requests = options.offload_policy == "request"
        # Other tiers are configured to get certain chunks, which admission must not withhold.
        is_open = self.store_policy.moment is not StoreMoment.HIT and not self.whole_requests
        enabled = is_open and options.admission == "auto"
        self.admission = Admission(client.stats, client.log, enabled=enabled)
        self.bit = 1 << self.index
