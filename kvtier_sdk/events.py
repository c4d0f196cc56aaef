"""Events: chunks that were stored or removed, for routing requests to the chunks they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_sdk.types import Locality, Medium, OffloadKey


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Chunks were stored in a tier or removed from it.

    Attributes:
        keys: the chunks.
        tier: the tier's name; the primary tier's is ``"host"``.
        medium: the medium on which the tier keeps chunks.
        locality: the place of the tier.
        removed: True if they were removed, False if they were stored.
    """

    keys: Sequence[OffloadKey]
    tier: str
    medium: Medium
    locality: Locality
    removed: bool


#: The name of the primary tier in events and metrics.
PRIMARY = "host"
