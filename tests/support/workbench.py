"""Opens tiers from URLs and options, and makes transfers for the tiers."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Sequence

from kvtier_sdk import (
    Clock,
    Namespace,
    RequestContext,
    SecondaryTierManager,
    SystemClock,
    TierContext,
    TierError,
    TierSpec,
    Transfer,
)
from kvtier_sdk.chunk_header import header_bytes, round_up


class Workbench:
    request = RequestContext("r1")

    def __init__(self, chunk_bytes: int = 100_000, *, alignment: int = 1) -> None:
        self.alignment = alignment
        self.header_bytes = header_bytes(alignment)
        self.chunk_bytes = chunk_bytes
        self.clock: Clock = SystemClock()
        self.facts: dict[str, object] = {"model": "m", "dtype": "bf16"}
        self.removed: list[bytes] = []
        self.evicted: list[bytes] = []
        self.expired: list[bytes] = []
        self.opened: list[SecondaryTierManager] = []

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.facts)

    @property
    def payload_bytes(self) -> int:
        return round_up(self.chunk_bytes, self.alignment)

    @property
    def object_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes

    def make(self, url: str, **options: object) -> SecondaryTierManager:
        return self.make_tier(TierSpec.from_url(url, **options))

    def make_tier(self, spec: TierSpec) -> SecondaryTierManager:
        context = TierContext(
            name=spec.name,
            namespace=self.namespace,
            chunk_bytes=self.chunk_bytes,
            header_bytes=self.header_bytes,
            payload_bytes=self.payload_bytes,
            clock=self.clock,
            logger=logging.getLogger(f"kvtier.tier.{spec.name}"),
            report_removed=self._note_removed,
            digest_bytes=self.chunk_bytes,
        )
        return spec.tier_class(spec.config, context)

    def _note_removed(
        self, keys: Iterable[bytes], *, evicted: bool = False, expired: bool = False
    ) -> None:
        self.removed.extend(keys)
        if evicted:
            self.evicted.extend(keys)
        if expired:
            self.expired.extend(keys)

    async def open(self, *url: str, **options: object) -> SecondaryTierManager:
        tier = self.make(*url, **options)
        self.opened.append(tier)
        await tier.open()
        return tier

    async def close(self) -> None:
        while self.opened:
            await self.opened.pop().close()

    def empty(self, key: bytes) -> Transfer:
        """Create a transfer for a load. With an alignment, the buffers begin at page boundaries."""
        header, payload = (
            mmap.mmap(-1, length) if self.alignment > 1 else bytearray(length)
            for length in (self.header_bytes, self.payload_bytes)
        )
        return Transfer(key, self.request, memoryview(header), memoryview(payload))

    def content(self, key: bytes, seed: int = 0) -> bytes:
        pattern = key + bytes([seed]) + bytes(range(251)) + b"\r\n"
        return (pattern * (self.object_bytes // len(pattern) + 1))[: self.object_bytes]

    def full(self, key: bytes, seed: int = 0, *, replace: bool = False) -> Transfer:
        transfer = self.empty(key)
        transfer.replace = replace
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
