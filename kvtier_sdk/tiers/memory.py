"""The memory tier, which keeps chunks in this process and can simulate a slower store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from kvtier_sdk.contract import SecondaryTierManager, TierContext
from kvtier_sdk.errors import ChunkNotFoundError, CorruptChunkError, TierError
from kvtier_sdk.options.tier import BoundedTierConfig, TierConfig
from kvtier_sdk.options.units import Bytes, Seconds
from kvtier_sdk.types import Capability, Entry, Medium, OffloadKey, RequestContext, Transfer, Usage


class MemoryTierConfig(BoundedTierConfig):
    """Options of the memory tier.

    Attributes:
        latency_s: the time added to each lookup, store and load.
        bandwidth_bytes: bytes per second that loads and stores share; unlimited by default.
    """

    refuses: ClassVar[Mapping[str, str]] = {
        "min_free": "the memory tier has no file system to keep free; write 'capacity'"
    }

    latency_s: Seconds = Field(0.0, alias="latency")
    bandwidth_bytes: Bytes | None = Field(None, alias="bandwidth", gt=0)


class MemoryTier(SecondaryTierManager):
    """A tier that keeps chunks in a dictionary, and evicts the least recently used chunk first.

    Expired chunks stay until a later call removes and reports them.
    """

    config_model: ClassVar[type[TierConfig]] = MemoryTierConfig
    medium = Medium.CPU
    capabilities: ClassVar[Capability] = (
        Capability.DELETE | Capability.TOUCH | Capability.SCAN | Capability.USAGE
    )
    contract_version: ClassVar[int] = 1
    config: MemoryTierConfig

    def __init__(self, config: MemoryTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self._objects: dict[OffloadKey, npt.NDArray[np.uint8]] = {}
        # The time of each chunk's last use, and of its last store. Both are in ascending order.
        self._used_s: OrderedDict[OffloadKey, float] = OrderedDict()
        self._stored_s: OrderedDict[OffloadKey, float] = OrderedDict()
        self._used_bytes = 0
        # The time at which the simulated network link becomes free.
        self._wire_free_s = 0.0

    async def open(self) -> None:
        self.config.check_capacity(self.context.object_bytes)

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        await self._travel(0)
        self._remove_expired()
        return [key in self._objects for key in keys]

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        await self._travel(sum(transfer.object_bytes for transfer in batch))
        self._remove_expired()
        for transfer in batch:
            self._put(transfer)
        return [None] * len(batch)

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        await self._travel(sum(len(self._objects.get(one.key, b"")) for one in batch))
        self._remove_expired()
        return [self._get(transfer) for transfer in batch]

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._remove([key for key in keys if key in self._objects])

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._remove_expired()
        for key in keys:
            if key in self._objects:
                self._use(key)

    async def scan(self) -> AsyncIterator[Entry]:
        self._remove_expired()
        for key, stored in list(self._objects.items()):
            yield Entry(key, len(stored))

    async def usage(self) -> Usage:
        self._remove_expired()
        return Usage(len(self._objects), self._used_bytes, self.config.capacity_bytes)

    async def _travel(self, size_bytes: int) -> None:
        """Wait for the simulated link, which transfers one batch at a time."""
        now_s = sent_s = self.context.clock.now_s()
        if self.config.bandwidth_bytes is not None:
            sent_s = max(now_s, self._wire_free_s) + size_bytes / self.config.bandwidth_bytes
            self._wire_free_s = sent_s
        arrival_s = sent_s + self.config.latency_s
        if arrival_s > now_s:
            await self.context.clock.sleep(arrival_s - now_s)

    def _put(self, transfer: Transfer) -> None:
        # Use numpy, which releases the interpreter lock during a copy, unlike a bytearray.
        stored = np.empty(transfer.object_bytes, np.uint8)
        stored[: len(transfer.header)] = transfer.header
        stored[len(transfer.header) :] = transfer.payload
        replaced = self._objects.pop(transfer.key, None)
        self._used_bytes += len(stored) - (len(replaced) if replaced is not None else 0)
        self._objects[transfer.key] = stored
        self._use(transfer.key)
        self._stored_s[transfer.key] = self.context.clock.now_s()
        self._stored_s.move_to_end(transfer.key)
        capacity = self.config.capacity_bytes
        while capacity is not None and self._used_bytes > capacity:
            self._remove([next(iter(self._used_s))], evicted=True)

    def _get(self, transfer: Transfer) -> TierError | None:
        stored = self._objects.get(transfer.key)
        if stored is None:
            return ChunkNotFoundError("no such chunk")
        try:
            transfer.received(len(stored))
        except CorruptChunkError as damage:
            return damage.detached()
        split = len(transfer.header)
        np.frombuffer(transfer.header, np.uint8)[:] = stored[:split]
        np.frombuffer(transfer.arrived, np.uint8)[:] = stored[split:]
        self._use(transfer.key)
        return None

    def _use(self, key: OffloadKey) -> None:
        self._used_s[key] = self.context.clock.now_s()
        self._used_s.move_to_end(key)

    def _remove_expired(self) -> None:
        config = self.config
        for age_s, times_s in ((config.ttl_s, self._used_s), (config.max_age_s, self._stored_s)):
            if age_s is not None:
                too_old = []
                for key, time_s in times_s.items():
                    if time_s > self.context.clock.now_s() - age_s:
                        break
                    too_old.append(key)
                self._remove(too_old, expired=True)

    def _remove(self, keys: Sequence[OffloadKey], **why: bool) -> None:
        for key in keys:
            self._used_bytes -= len(self._objects.pop(key))
            del self._used_s[key], self._stored_s[key]
        if keys:
            self.context.report_removed(keys, **why)
