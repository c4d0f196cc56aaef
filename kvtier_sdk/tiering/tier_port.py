"""One secondary tier, seen from the engine's thread: what waits to be handed to its runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_sdk.events import OffloadingEvent
from kvtier_sdk.jobs import Job, JobTable, Operation
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.tier_spec import TierSpec
from kvtier_sdk.types import Capability, OffloadKey, RequestContext

_NOBODY = RequestContext("kvtier")


@dataclass(slots=True)
class _Batch:
    """Chunks of one request that wait for the end of the step."""

    request: RequestContext
    keys: list[OffloadKey] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)


class TierPort:
    """Collects a step's lookups, loads and stores, and hands them over in one hop.

    Attributes:
        spec: the tier.
        index: its place in the order in which tiers are asked.
        bit: ``1 << index``.
        runner: runs it.
        jobs: what was handed over and is not yet released.
        stats: what it has done.
        store_bytes: payload of stores that are collected or under way.
        load_bytes: payload of loads that are collected or under way.
    """

    def __init__(self, index: int, spec: TierSpec, runner: TierRunner, chunk_bytes: int) -> None:
        self.spec = spec
        self.index = index
        self.bit = 1 << index
        self.runner = runner
        self.jobs = JobTable()
        self.stats = TierStats(spec.name, spec.backend)
        self.store_bytes = 0
        self.load_bytes = 0
        self._chunk_bytes = chunk_bytes
        self._touches = Capability.TOUCH in spec.tier_class.capabilities
        self._lookups: dict[str, _Batch] = {}
        self._loads: dict[str, _Batch] = {}
        self._stores: list[_Batch] = []
        self._touched: Sequence[OffloadKey] = ()

    @property
    def waiting(self) -> bool:
        """Whether anything is collected and not yet handed over."""
        return bool(self._lookups or self._loads or self._stores)

    def lookup(self, key: OffloadKey, request: RequestContext) -> None:
        """Collect a question."""
        batch = self._lookups.get(request.request_id)
        if batch is None:
            batch = self._lookups[request.request_id] = _Batch(request)
        batch.keys.append(key)

    @property
    def has_load_room(self) -> bool:
        """Whether the queue has room for another load."""
        return self.load_bytes + self._chunk_bytes <= self.spec.runner.max_queue_bytes

    def load(self, key: OffloadKey, slot: int, request: RequestContext) -> None:
        """Collect a promotion."""
        self.load_bytes += self._chunk_bytes
        batch = self._loads.get(request.request_id)
        if batch is None:
            batch = self._loads[request.request_id] = _Batch(request)
        batch.keys.append(key)
        batch.slots.append(slot)

    def store(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], request: RequestContext
    ) -> int:
        """Collect stores, as many from the front as the queue has room for.

        Returns:
            How many were taken; the others are dropped, and counted.
        """
        room = (self.spec.runner.max_queue_bytes - self.store_bytes) // self._chunk_bytes
        taken = min(len(keys), max(0, room))
        if taken < len(keys):
            self.stats.dropped["store.queue_full"] += len(keys) - taken
        if taken:
            self.store_bytes += taken * self._chunk_bytes
            self._stores.append(_Batch(request, list(keys[:taken]), list(slots[:taken])))
        return taken

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Pass the step's uses on, where the tier wants them."""
        if self._touches:
            self._touched = keys

    def settled(self, job: Job) -> None:
        """A job has been concluded: its bytes are no longer under way."""
        size_bytes = len(job.keys) * self._chunk_bytes
        if job.operation is Operation.STORE:
            self.store_bytes -= size_bytes
        elif job.operation is Operation.LOAD:
            self.load_bytes -= size_bytes

    def flush(self, now_s: float, new_job_id: Callable[[], int]) -> list[Job]:
        """Hand over what was collected.

        Args:
            now_s: the time, from which deadlines count.
            new_job_id: gives the next job's id.

        Returns:
            The jobs that were handed over.
        """
        options = self.spec.runner
        jobs = [
            Job(new_job_id(), operation, batch.keys, batch.slots, batch.request, now_s + within_s)
            for operation, batches, within_s in (
                (Operation.LOOKUP, self._lookups.values(), options.lookup_deadline_s),
                (Operation.LOAD, self._loads.values(), options.load_deadline_s),
                (Operation.STORE, self._stores, options.store_deadline_s),
            )
            for batch in batches
        ]
        if self._touched:
            deadline_s = now_s + options.store_deadline_s
            jobs.append(Job(new_job_id(), Operation.TOUCH, self._touched, (), _NOBODY, deadline_s))
            self._touched = ()
        if jobs:
            self._lookups, self._loads, self._stores = {}, {}, []
            for job in jobs:
                self.jobs.add(job)
            self.runner.submit(jobs)
        return jobs

    def event(self, keys: Sequence[OffloadKey], *, removed: bool) -> OffloadingEvent:
        """An event of this tier."""
        tier_class = self.spec.tier_class
        return OffloadingEvent(
            keys, self.spec.name, tier_class.medium, tier_class.locality, removed
        )
