"""Tiers by their URLs, and transfers to put into them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kvtier_sdk import (
    Namespace,
    RequestContext,
    SecondaryTierManager,
    SystemClock,
    TierContext,
    TierError,
    TierSpec,
    Transfer,
)

HEADER_BYTES = 64


class Workbench:
    """Opens tiers and makes what is stored in them."""

    request = RequestContext("r1")

    def __init__(self, chunk_bytes: int = 100_000) -> None:
        self.header_bytes = HEADER_BYTES
        self.chunk_bytes = chunk_bytes
        self.facts: dict[str, object] = {"model": "m", "dtype": "bf16"}
        self.removed: list[bytes] = []
        self.opened: list[SecondaryTierManager] = []

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.facts)

    @property
    def object_bytes(self) -> int:
        return self.header_bytes + self.chunk_bytes

    def make(self, url: str, **options: object) -> SecondaryTierManager:
        spec = TierSpec.from_url(url, **options)
        context = TierContext(
            name=spec.name,
            namespace=self.namespace,
            chunk_bytes=self.chunk_bytes,
            header_bytes=self.header_bytes,
            payload_bytes=self.chunk_bytes,
            clock=SystemClock(),
            logger=logging.getLogger(f"kvtier.tier.{spec.name}"),
            report_removed=self.removed.extend,
        )
        return spec.tier_class(spec.config, context)

    async def open(self, url: str, **options: object) -> SecondaryTierManager:
        tier = self.make(url, **options)
        self.opened.append(tier)
        await tier.open()
        return tier

    async def close(self) -> None:
        while self.opened:
            await self.opened.pop().close()

    def empty(self, key: bytes) -> Transfer:
        header, payload = bytearray(self.header_bytes), bytearray(self.chunk_bytes)
        return Transfer(key, self.request, memoryview(header), memoryview(payload))

    def content(self, key: bytes, seed: int = 0) -> bytes:
        pattern = key + bytes([seed]) + bytes(range(251)) + b"\r\n"
        return (pattern * (self.object_bytes // len(pattern) + 1))[: self.object_bytes]

    def full(self, key: bytes, seed: int = 0) -> Transfer:
        transfer = self.empty(key)
        text = self.content(key, seed)
        transfer.header[:] = text[: self.header_bytes]
        transfer.payload[:] = text[self.header_bytes :]
        return transfer

    def holds(self, transfer: Transfer, seed: int = 0) -> bool:
        return b"".join(transfer.buffers) == self.content(transfer.key, seed)

    async def put(self, tier: SecondaryTierManager, *keys: bytes) -> Sequence[TierError | None]:
        return await tier.store([self.full(key) for key in keys])

    async def has(self, tier: SecondaryTierManager, *keys: bytes) -> list[bool]:
        return list(await tier.lookup(keys, self.request))

    async def loads(self, tier: SecondaryTierManager, *keys: bytes) -> bool:
        batch = [self.empty(key) for key in keys]
        verdicts = await tier.load(batch)
        return verdicts == [None] * len(keys) and all(map(self.holds, batch))
