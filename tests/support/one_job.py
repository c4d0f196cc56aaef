"""Runs a memory tier's loop on the system's clock, one job at a time."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from kvtier_sdk import (
    HostPool,
    Job,
    JobResult,
    MemoryTier,
    Namespace,
    OffloadKey,
    Operation,
    RequestContext,
    SystemClock,
    TierSpec,
)
from kvtier_sdk.runner import TierLoop
from kvtier_sdk.runner.jobs import Report


class OneJobLoop:
    def __init__(
        self, url: str, tier_class: type[MemoryTier], namespace: Namespace, pool: HostPool
    ) -> None:
        self.pool = pool
        self.reports: list[Report] = []
        self.clock = SystemClock()
        self.loop = TierLoop(
            replace(TierSpec.from_url(url), tier_class=tier_class),
            namespace=namespace,
            memory=pool,
            clock=self.clock,
            report=self.reports.append,
        )
        assert isinstance(self.loop.call.tier, tier_class)
        self.tier = self.loop.call.tier
        self._ids = itertools.count()

    def job(self, operation: Operation, key: OffloadKey, slot: int = 0) -> Job:
        deadline_s = self.clock.now_s() + 30
        return Job(next(self._ids), operation, [key], [slot], RequestContext("r"), deadline_s)

    async def result_of(self, operation: Operation, key: OffloadKey, slot: int = 0) -> JobResult:
        job = self.job(operation, key, slot)
        self.loop.submit([job])
        while True:
            for report in self.reports:
                if isinstance(report, JobResult) and report.job_id == job.job_id:
                    return report
            await asyncio.sleep(0.001)
