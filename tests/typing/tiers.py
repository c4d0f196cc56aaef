"""Tiers that a test checks with mypy, which must report exactly the errors marked ``# E:``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from kvtier_sdk import (
    Capability,
    ChunkNotFoundError,
    ChunkTierManager,
    Clock,
    Connection,
    ConnectionPool,
    Entry,
    EvictionPolicy,
    OffloadKey,
    RequestContext,
    SecondaryTierManager,
    TierConfig,
    TierContext,
    TierError,
    TierUnavailableError,
    Transfer,
    Usage,
    map_exceptions,
)


class RightConfig(TierConfig):
    root: str


class Right(SecondaryTierManager):
    config_model = RightConfig
    capabilities = Capability.DELETE | Capability.SCAN | Capability.USAGE
    contract_version = 1
    config: RightConfig

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> list[bool]:
        return [self.config.root == "" for _ in keys]

    async def store(self, batch: Sequence[Transfer]) -> list[TierError | None]:
        return [None] * len(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        return [TierError("no")] * len(batch)

    async def scan(self) -> AsyncIterator[Entry]:
        yield Entry(b"", 0)

    async def usage(self) -> Usage:
        return Usage(0, 0, None)


class RightChunks(ChunkTierManager):
    contract_version = 1

    async def contains_chunk(self, key: OffloadKey) -> bool:
        return False

    async def store_chunk(self, transfer: Transfer) -> None:
        return None

    async def load_chunk(self, transfer: Transfer) -> None:
        transfer.payload[:] = bytes(len(transfer.payload))


class NotAsync(Right):
    def store(self, batch: Sequence[Transfer]) -> list[TierError | None]:  # E: override
        return []


class NoRequest(Right):
    async def lookup(self, keys: Sequence[OffloadKey]) -> list[bool]:  # E: override
        return []


class OneVerdict(Right):
    async def store(self, batch: Sequence[Transfer]) -> TierError | None:  # E: override
        return None


class ListedScan(Right):
    async def scan(self) -> list[Entry]:  # E: override
        return []


class TextKeys(RightChunks):
    async def contains_chunk(self, key: str) -> bool:  # E: override
        return False


class DictConfig(RightChunks):
    config_model = dict  # E: assignment


class Forgetful(EvictionPolicy):
    def on_access(self, key: OffloadKey) -> None:  # E: override
        return None


class Line:
    @property
    def is_usable(self) -> bool:
        return True

    def close(self, reason: str) -> None:
        return None


async def pools(clock: Clock) -> None:
    async def dial() -> Line:
        return Line()

    async with ConnectionPool(dial, 2).borrow() as line:
        line.close("the end")
    async with ConnectionPool(
        lambda: Connection.connect(("kv-1", 7000), clock=clock, timeout_s=2.0), 2
    ).borrow() as connection:
        await connection.send(["GET"])  # E: list-item


def mappings() -> None:
    classes = {FileNotFoundError: ChunkNotFoundError, OSError: TierUnavailableError}
    groups = {(KeyError, OSError): TierUnavailableError, ValueError: TierUnavailableError}
    with map_exceptions(classes), map_exceptions(groups):
        pass
    with map_exceptions({OSError: ValueError}):  # E: dict-item
        pass


def unfinished(config: TierConfig, context: TierContext) -> None:
    class NoLoad(ChunkTierManager):
        contract_version = 1

        async def contains_chunk(self, key: OffloadKey) -> bool:
            return False

        async def store_chunk(self, transfer: Transfer) -> None:
            return None

    NoLoad(config, context)  # E: abstract
