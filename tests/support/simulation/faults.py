"""Random faults of a simulated tier, drawn independently for each call."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import (
    ChunkNotFoundError,
    CorruptChunkError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
)
from support.simulation.plan import TierPlan

_ERRORS: tuple[Callable[[str], TierError], ...] = (
    ChunkNotFoundError,
    CorruptChunkError,
    TierUnavailableError,
    TierTimeoutError,
    TierAuthError,
    TierCapacityError,
    TierError,
)
_KINDS = {"error": 4, "bug": 1, "late": 2, "hang": 2, "some": 4, "damage": 4, "length": 1}


class Weather:
    def __init__(self, plan: TierPlan, rng: random.Random, clock: Clock) -> None:
        self.calm = False  # true ends all faults and delays
        self.seen: Counter[str] = Counter()
        self._plan = plan
        self._clock = clock
        self._rng = rng
        self._out_until_s = -1.0
        self._may_break_contract = plan.breaks_contract
        self._refused_openings = plan.refused_openings

    def begin_outage(self) -> None:
        self.seen["outage"] += 1
        self._out_until_s = self._clock.now_s() + self._rng.uniform(0.02, 0.5)

    def clear_up(self) -> None:
        self.calm = True

    def open(self) -> None:
        if self._refused_openings and not self.calm:
            self._refused_openings -= 1
            self.seen["refused opening"] += 1
            raise TierUnavailableError("not there yet")

    async def suffer(self) -> str:
        rng = self._rng
        kind = self._draw()
        # Draw everything before the first wait, because other calls draw numbers during a wait.
        latency_s = 0.0 if self.calm else rng.uniform(0, self._plan.latency_s)
        late_s = rng.uniform(0.5, 2.0) * self._plan.longest_s
        error = rng.choice(_ERRORS)("drawn")
        outage = self._clock.now_s() < self._out_until_s and not self.calm
        if kind:
            self.seen[kind] += 1
        if kind == "hang":
            await self._hang(self._clock.now_s() + late_s)
        else:
            await self._clock.sleep(late_s if kind == "late" else latency_s)
        if outage:
            raise TierUnavailableError("an outage")
        if kind == "error":
            raise error
        if kind == "bug":
            raise KeyError("a faulty tier")
        return kind if kind in ("some", "damage", "length") else ""

    def _draw(self) -> str:
        if self._rng.random() >= self._plan.fault_rate or self.calm:
            return ""
        kind = self._rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        if kind == "length":
            if not self._may_break_contract:
                return ""
            self._may_break_contract = False
        return kind

    async def _hang(self, until_s: float) -> None:
        """Ignore cancellations until ``until_s`` or the end of faults, like a hung system call."""
        while not self.calm and (left_s := until_s - self._clock.now_s()) > 0:
            try:
                await self._clock.sleep(left_s)
            except asyncio.CancelledError:
                continue
