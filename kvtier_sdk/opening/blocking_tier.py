"""A tier for a thread that waits for each answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
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

#: Longest pause between polls: a client concludes an overdue job only when it is polled.
_LOOK_S = 1.0


class BlockingTier:
    """Hands jobs to a tier's client, and waits until they are concluded.

    Attributes:
        client: the tier's client.
    """

    def __init__(self, client: TierClient, reported: threading.Event, clock: Clock) -> None:
        self.client = client
        self._reported = reported
        self._clock = clock

    @classmethod
    def make(
        cls, spec: TierSpec, pool: PoolMemory, namespace: Namespace, *, clock: Clock
    ) -> BlockingTier:
        """Make a tier with the runner that its options ask for; nothing runs yet."""
        reported = threading.Event()
        client = make_client(
            spec, pool, namespace, TierListener(), clock=clock, notify=reported.set
        )
        return cls(client, reported, clock)

    def result_of(self, job: Job | None) -> JobResult:
        """Hand a job over and return its result, soon after its deadline at the latest.

        Raises:
            TierUnavailableError: the client did not take the job.
        """
        # An empty queue takes any job; only an open breaker refuses one.
        if job is None:
            raise TierUnavailableError(f"{self.client.spec.name}: its breaker is open")
        self.client.flush()
        self.wait(lambda: job.result is not None)
        return cast(JobResult, job.result)

    def wait(self, is_over: Callable[[], bool], within_s: float = math.inf) -> None:
        """Poll for reports until a condition holds, or the time is up."""
        end_s = self._clock.now_s() + within_s
        self.client.poll()
        while not is_over() and (left_s := end_s - self._clock.now_s()) > 0:
            self._reported.wait(min(left_s, _LOOK_S))
            # Cleared first: a report that comes after the poll ends the next wait.
            self._reported.clear()
            self.client.poll()
