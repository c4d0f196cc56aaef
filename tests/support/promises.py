"""Checks that calls to a tier keep the contract's promises. Test tiers run the checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtier_sdk import OffloadKey, SecondaryTierManager, TierContext, Transfer


def fault_of_keys(tier: SecondaryTierManager, keys: Sequence[OffloadKey]) -> str | None:
    if len(set(keys)) < len(keys):
        return f"a key was named twice: {keys}"
    if tier.max_batch_keys is not None and len(keys) > tier.max_batch_keys:
        return f"{len(keys)} keys in a call of at most {tier.max_batch_keys}"
    return None


def fault_of_batch(tier: SecondaryTierManager, batch: Sequence[Transfer]) -> str | None:
    keys = [transfer.key for transfer in batch]
    return fault_of_keys(tier, keys) or fault_of_regions(tier.context, batch)


def fault_of_regions(context: TierContext, batch: Iterable[Transfer]) -> str | None:
    """Return a message if a buffer lies outside the context's regions."""
    for transfer in batch:
        for place, buffer in zip(transfer.regions, transfer.buffers, strict=True):
            assert place.size_bytes == len(buffer)
            if not any(region.covers(place) for region in context.regions):
                return f"{place} is in none of {context.regions}"
    return None
