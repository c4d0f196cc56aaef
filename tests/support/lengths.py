"""Checks that a tier stores and loads objects of different lengths."""

from __future__ import annotations

from kvtier_sdk import SecondaryTierManager, Transfer
from support.workbench import Workbench


def shorter(transfer: Transfer, payload_bytes: int) -> Transfer:
    """Return a store of the payload's beginning, as the SDK makes it for a compressed chunk."""
    return transfer.compressed(transfer.payload[:payload_bytes])


async def check_lengths(bench: Workbench, tier: SecondaryTierManager, key: bytes) -> None:
    """Assert that a chunk is overwritten by shorter and longer ones, and loads at its length."""
    for seed, payload_bytes in enumerate((bench.payload_bytes, 1, 70_000, 2_000, 70_001)):
        stored = shorter(bench.full(key, seed, replace=True), payload_bytes)
        assert await tier.store([stored]) == [None]
        loaded = bench.empty(key)
        assert await tier.load([loaded]) == [None]
        object_bytes = bench.header_bytes + payload_bytes
        found = b"".join([loaded.header, loaded.arrived])
        assert found == bench.content(key, seed)[:object_bytes]
        assert [entry.object_bytes async for entry in tier.scan()] == [object_bytes]
