"""What happened to chunks, after the fact, for whoever routes requests to where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier_sdk.types import Locality, Medium, OffloadKey


@dataclass(frozen=True, slots=True)
class OffloadingEvent:
    """Chunks were stored in a tier or removed from it.

    Attributes:
        keys: which.
        tier: the tier's name; the primary tier's is :data:`PRIMARY`.
        medium: what the tier keeps chunks on.
        locality: where the tier is.
        removed: true if they were removed, false if stored.
    """

    keys: Sequence[OffloadKey]
    tier: str
    medium: Medium
    locality: Locality
    removed: bool


#: The name under which the primary tier appears in events and figures.
PRIMARY = "host"
