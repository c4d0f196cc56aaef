"""Tiers that keep the contract in unusual ways; the conformance kit must pass them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvtier_sdk.contract import TierContext
from kvtier_sdk.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.options.tier import TierConfig
from kvtier_sdk.types import Capability, Medium, OffloadKey, RequestContext, Transfer, Usage
from support.promises import fault_of_batch, fault_of_keys
from support.tiers.shelf import ShelfName, ShelfTier


class OddTier(ShelfTier):
    settings: ClassVar[dict[str, Any]] = {}
    # True if the tier's oddity matters to the checks that start processes.
    in_processes: ClassVar[bool] = False


class Slow(OddTier):
    """Takes 10 ms longer for every call."""

    async def reach(self) -> None:
        await self.context.clock.sleep(0.01)
        await super().reach()


class ByTheBook(OddTier):
    """Refuses calls that break the contract's promises, and does not count its chunks."""

    max_batch_keys = 3
    runner_defaults: ClassVar[dict[str, Any]] = {"concurrency": 2}

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        self._check(fault_of_keys(self, keys))
        return await super().lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self._check(fault_of_batch(self, batch))
        return await super().store(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self._check(fault_of_batch(self, batch))
        return await super().load(batch)

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._check(fault_of_keys(self, keys))
        await super().touch(keys)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._check(fault_of_keys(self, keys))
        await super().delete(keys)

    async def usage(self) -> Usage:
        return replace(await super().usage(), chunks=None)

    def _check(self, fault: str | None) -> None:
        if fault is not None:
            raise TierError(fault)


class Unordered(OddTier):
    """Handles a batch's chunks in any order, but returns the results in the batch's order."""

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._random = random.Random(1)

    async def reach(self) -> None:
        await self.context.clock.sleep(self._random.random() * 0.004)
        await super().reach()


class Caching(OddTier):
    """Keeps every chunk in a cache, and answers from the cache even during an outage."""

    in_processes = True

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._seen: dict[OffloadKey, bytes] = {}

    def expire(self, name: ShelfName) -> None:
        super().expire(name)
        if self.is_expired(name):
            self._seen.pop(name[1], None)

    async def contains_chunk(self, key: OffloadKey) -> bool:
        self.expire(self.name_of(key))
        return key in self._seen or await super().contains_chunk(key)

    async def store_chunk(self, transfer: Transfer) -> None:
        content = b"".join(transfer.buffers)
        await super().store_chunk(transfer)
        self._seen[transfer.key] = content

    async def load_chunk(self, transfer: Transfer) -> None:
        if transfer.key in self._seen:
            transfer.fill(self._seen[transfer.key])
        else:
            await super().load_chunk(transfer)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await super().delete(keys)
        for key in keys:
            self._seen.pop(key, None)


class Refusing(OddTier):
    """Has no room for any chunk."""

    settings: ClassVar[dict[str, Any]] = {"keeps_chunks": False}

    async def store_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        raise TierCapacityError("there is never room")


class LandsLate(OddTier):
    """Writes the chunk of a cancelled store 5 ms after the cancellation."""

    async def store_chunk(self, transfer: Transfer) -> None:
        content = b"".join(transfer.buffers)
        try:
            await self.reach()
        except asyncio.CancelledError:
            self.context.clock.call_at(
                self.context.clock.now_s() + 0.005, self.put, transfer.key, content
            )
            raise
        self.put(transfer.key, content)


class OneConnection(OddTier):
    """Makes only one call to its store at a time."""

    def __init__(self, config: TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._connection = asyncio.Lock()

    async def reach(self) -> None:
        async with self._connection:
            await super().reach()


class Mending(OddTier):
    """Restores the lost part of an object from the other parts."""

    def mend(self, stored: bytes) -> bytes:
        return stored

    async def contains_chunk(self, key: OffloadKey) -> bool:
        await self.reach()
        self.expire(self.name_of(key))
        return self.name_of(key) in self.shelf.objects


class Impatient(OddTier):
    """Raises an error if a call hangs for half a second, without waiting for a cancellation."""

    async def reach(self) -> None:
        try:
            async with self.context.clock.timeout(0.5):
                await super().reach()
        except TimeoutError:
            raise TierTimeoutError("no reply") from None


class Forgetful(OddTier):
    """Stores at most eight chunks, and evicts the oldest to make room for a new chunk."""

    def put(self, key: OffloadKey, stored: bytes) -> None:
        super().put(key, stored)
        own = [name for name in self.shelf.objects if name[0] == self.name_of(key)[0]]
        for name in own[:-8]:
            del self.shelf.objects[name]
            self.context.report_removed([name[1]], evicted=True)


class FirstComeFirstKept(OddTier):
    """Keeps the old object when a key is stored again, unless ``transfer.replace`` is true."""

    async def store_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        content = b"".join(transfer.buffers)
        if transfer.replace or self.name_of(transfer.key) not in self.shelf.objects:
            self.put(transfer.key, content)


class AllOrNothing(OddTier):
    """Raises one error for a whole batch in an outage, and has no optional capability."""

    capabilities = Capability.NONE

    async def reach(self) -> None:
        if not self.shelf.connected:
            raise TierUnavailableError("no route to host")


class KeepsItsLastError(OddTier):
    """Keeps the last exception until the next exception, as Rust clients do."""

    async def load_chunk(self, transfer: Transfer) -> None:
        try:
            await self._load_with_client(transfer)
        except LookupError as error:
            self._last = error
            raise ChunkNotFoundError("gone") from error

    async def _load_with_client(self, transfer: Transfer) -> None:
        try:
            await super().load_chunk(transfer)
        except ChunkNotFoundError:
            raise LookupError(transfer.key.hex()) from None


class Shaky(OddTier):
    """Fails every fifth call, but succeeds if the call is repeated."""

    _calls = 0

    def _shake(self) -> None:
        self._calls += 1
        if self._calls % 5 == 0:
            raise TierUnavailableError("busy")

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        self._shake()
        return await super().lookup(keys, request)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self._shake()
        return await super().store(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self._shake()
        return await super().load(batch)


class OfThisProcess(OddTier):
    """Reports CPU memory as its medium, and lists only its own namespace."""

    in_processes = True
    medium = Medium.CPU

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        async for namespace in super().namespaces():
            if namespace == self.context.namespace:
                yield namespace


class Aligned(OddTier):
    """Requires page-aligned buffers whose lengths are multiples of a page."""

    in_processes = True
    alignment: ClassVar[int] = 4096


class OneLength(OddTier):
    """Reads and writes only objects of full length, and does not report their length."""

    fixed_length = True

    async def store_chunk(self, transfer: Transfer) -> None:
        if transfer.object_bytes != self.context.object_bytes:
            raise TierError("too short")
        await super().store_chunk(transfer)

    async def load_chunk(self, transfer: Transfer) -> None:
        await self.reach()
        stored, split = self.take(transfer.key), len(transfer.header)
        if len(stored) != transfer.object_bytes:
            raise CorruptChunkError("another length")
        transfer.header[:], transfer.payload[:] = stored[:split], stored[split:]


ODD_TIERS: tuple[type[OddTier], ...] = tuple(OddTier.__subclasses__())
