"""The rule that every transfer lies in the memory that its tier was told of."""

from __future__ import annotations

from collections.abc import Iterable

from kvtier_sdk import TierContext, Transfer


def fault_of_regions(context: TierContext, batch: Iterable[Transfer]) -> str | None:
    """Return a sentence if a buffer of a batch lies outside of the context's regions."""
    for transfer in batch:
        for place, buffer in zip(transfer.regions, transfer.buffers, strict=True):
            assert place.size_bytes == len(buffer)
            if not any(region.covers(place) for region in context.regions):
                return f"{place} is in none of {context.regions}"
    return None
