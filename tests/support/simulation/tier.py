"""A memory tier with seeded faults, which reports each access to its buffers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import numpy as np

from kvtier_sdk.errors import TierError
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.tiers.memory import MemoryTier, MemoryTierConfig
from kvtier_sdk.types import Entry, OffloadKey, RequestContext, Transfer
from support.promises import fault_of_batch, fault_of_keys


class SimulatedTierConfig(MemoryTierConfig):
    weather: Any
    on_touch: Any
    on_put: Any
    on_open: Any
    on_broken_promise: Any  # called with a description of the breach
    rng: Any


#: Fraction of the loads in which the tier removes a chunk that has just been loaded.
_LEAVES_WHILE_LOADED = 0.1


class SimulatedTier(MemoryTier):
    config_model: ClassVar[type[MemoryTierConfig]] = SimulatedTierConfig
    config: Any

    async def open(self) -> None:
        self.config.on_open(self)
        self.config.weather.open()
        await super().open()

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        self._check(fault_of_keys(self, keys))
        trouble = await self.config.weather.suffer()
        found = [key in self._objects for key in keys]
        return found[1:] if trouble == "length" else found

    def _check(self, fault: str | None) -> None:
        if fault is not None:
            self.config.on_broken_promise(fault)

    async def store(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self._check(fault_of_batch(self, batch))
        trouble = await self.config.weather.suffer()
        failing = self._failing(batch, trouble)
        verdicts: list[TierError | None] = []
        for index, transfer in enumerate(batch):
            self.config.on_touch(Operation.STORE, transfer)
            if index not in failing:
                self._put(transfer)
                self.config.on_put(transfer.key)
            verdicts.append(failing.get(index))
        if trouble == "damage":
            self.damage(batch[0].key)
        return verdicts[1:] if trouble == "length" else verdicts

    async def load(self, batch: Sequence[Transfer]) -> Sequence[TierError | None]:
        self._check(fault_of_batch(self, batch))
        for transfer in batch:
            self.config.on_touch(Operation.LOAD, transfer)
            # Write noise first, because an interrupted read can leave any bytes in the buffer.
            transfer.payload[:] = b"\xaa" * len(transfer.payload)
        trouble = await self.config.weather.suffer()
        if trouble == "damage":
            self.damage(batch[0].key)
        failing = self._failing(batch, trouble)
        verdicts: list[TierError | None] = []
        for index, transfer in enumerate(batch):
            self.config.on_touch(Operation.LOAD, transfer)
            verdicts.append(failing.get(index) or self._get(transfer))
        if self.config.rng.random() < _LEAVES_WHILE_LOADED and self.holds(batch[-1].key):
            self._remove([batch[-1].key])
        return verdicts[1:] if trouble == "length" else verdicts

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        self._check(fault_of_keys(self, keys))
        await self.config.weather.suffer()
        await super().touch(keys)

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        self._check(fault_of_keys(self, keys))
        await self.config.weather.suffer()
        await super().delete(keys)

    async def scan(self) -> AsyncIterator[Entry]:
        await self.config.weather.suffer()
        async for entry in super().scan():
            yield entry

    def holds(self, key: OffloadKey) -> bool:
        return key in self._objects

    def lose(self) -> None:
        if self._objects:
            self._remove([self.config.rng.choice(list(self._objects))])

    def damage(self, key: OffloadKey) -> None:
        """Flip a bit of a stored object, truncate or extend the object, or replace its content."""
        stored = self._objects.get(key)
        if stored is None:
            return
        kind = self.config.rng.randrange(3)
        if kind == 0:
            stored[self.config.rng.randrange(len(stored))] ^= 1 << self.config.rng.randrange(8)
        elif kind == 1:
            at = self.config.rng.randrange(len(stored))
            self._replace(key, stored[:at] if at % 2 else np.append(stored, stored[:at]))
        else:
            other = self.config.rng.choice(list(self._objects))
            self._replace(key, self._objects[other])

    def _replace(self, key: OffloadKey, content: Any) -> None:
        self._used_bytes += len(content) - len(self._objects[key])
        self._objects[key] = content.copy()

    def _failing(self, batch: Sequence[Transfer], trouble: str) -> dict[int, TierError]:
        if trouble != "some":
            return {}
        return {
            index: TierError("drawn", retryable=self.config.rng.random() < 0.5)
            for index in range(len(batch))
            if self.config.rng.random() < 0.5
        }


class PaddedSimulatedTier(SimulatedTier):
    alignment = 128
    max_batch_keys = 3
