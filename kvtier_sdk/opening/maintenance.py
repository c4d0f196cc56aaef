"""Blocking access to single tiers, for tools."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import TierUnavailableError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening.tiers import make_client
from kvtier_sdk.runner import PoolMemory
from kvtier_sdk.runner.jobs import Job, JobResult
from kvtier_sdk.tiering.tier_client import TierClient
from kvtier_sdk.tiering.tier_listener import TierListener

#: The longest pause between polls. Only a poll can end an overdue job.
_LOOK_S = 1.0


@dataclass(eq=False)
class BlockingTier:
    """A tier for a caller that waits for each job."""

    client: TierClient
    _reported: threading.Event
    _clock: Clock

    @classmethod
    def make(
        cls, spec: TierSpec, pool: PoolMemory, namespace: Namespace, *, clock: Clock
    ) -> BlockingTier:
        """Make a tier whose client is not open yet."""
        reported = threading.Event()
        client = make_client(
            spec, pool, namespace, TierListener(), clock=clock, notify=reported.set
        )
        return cls(client, reported, clock)

    def result_of(self, job: Job | None) -> JobResult:
        """Wait for a job and return its result; the wait ends shortly after the job's deadline."""
        # The queue was empty, so ``None`` means a refusal, usually because the breaker is open.
        if job is None:
            raise TierUnavailableError(f"{self.client.spec.name}: its breaker is open")
        self.client.flush()
        self.wait(lambda: job.result is not None)
        return cast(JobResult, job.result)

    def wait(self, is_over: Callable[[], bool], within_s: float = math.inf) -> None:
        """Poll for reports until the condition holds or the time is up."""
        end_s = self._clock.now_s() + within_s
        self.client.poll()
        while not is_over() and (left_s := end_s - self._clock.now_s()) > 0:
            self._reported.wait(min(left_s, _LOOK_S))
            # Clear the event first, because a report during the poll must end the next wait.
            self._reported.clear()
            self.client.poll()
