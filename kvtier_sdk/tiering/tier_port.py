"""One secondary tier, seen from the engine's thread: what waits to be handed to its runner."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import StorePolicy
from kvtier_sdk.events import OffloadingEvent
from kvtier_sdk.metrics import TierStats
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.jobs import EVERY_CHUNK, BreakerMoved, Job, JobTable, Operation
from kvtier_sdk.tiering.load_rate import LoadRate
from kvtier_sdk.tiering.lookups import PendingLookup
from kvtier_sdk.tiering.removals import RecentRemovals
from kvtier_sdk.types import Capability, OffloadKey, RequestContext

#: On whose behalf the manager acts where it is nobody's in particular.
NOBODY = RequestContext("kvtier")

#: How long emptying a tier may take in one go; what is left then is tried again.
_PURGE_DEADLINE_S = 600.0

_log = logging.getLogger("kvtier.manager")


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
        store_policy: which chunks it gets.
        whole_requests: whether it gets all chunks of a request.
        store_bytes: payload of stores that are collected or under way.
        load_bytes: payload of loads that are collected or under way.
        departures: chunks that left the tier while stores were under way, where anybody wants
            events.
    """

    def __init__(
        self,
        index: int,
        spec: TierSpec,
        runner: TierRunner,
        store_policy: StorePolicy,
        slots: int,
        chunk_bytes: int,
    ) -> None:
        self.spec = spec
        self.index = index
        self.bit = 1 << index
        self.runner = runner
        self.jobs = JobTable()
        self.stats = TierStats(spec.name, spec.backend)
        self.store_policy = store_policy
        self.whole_requests = spec.runner.offload_policy == "request"
        self.store_bytes = 0
        self.load_bytes = 0
        self.departures = RecentRemovals(self.jobs)
        self._chunk_bytes = chunk_bytes
        # What waits for a tier is pinned: a slow one leaves half of a small pool to the others.
        self._max_store_bytes = min(spec.runner.max_queue_bytes, (slots + 1) // 2 * chunk_bytes)
        self._erasable = Capability.SCAN | Capability.DELETE in spec.tier_class.capabilities
        self._touches = Capability.TOUCH in spec.tier_class.capabilities
        self._loads: dict[str, _Batch] = {}
        self._stores: list[_Batch] = []
        self._touched: Sequence[OffloadKey] = ()
        self._load_rate = LoadRate()
        self._loads_running = 0
        self._reads_open = False
        self._stores_open = False
        # Whether it may hold chunks of before a reset that was meant for it too; whether they are
        # being deleted, and when that is tried (again).
        self._stale = False
        self._purging = False
        self._purge_at_s = -math.inf

    @property
    def takes_reads(self) -> bool:
        """Whether it is asked: not while its breaker is open, or until it was emptied."""
        return not self._reads_open and not self._stale

    @property
    def takes_stores(self) -> bool:
        """Whether it is given chunks, likewise."""
        return not self._stores_open and not self._stale

    @property
    def waiting(self) -> bool:
        """Whether anything is collected and not yet handed over."""
        return bool(self._loads or self._stores)

    # --- collecting ---------------------------------------------------------------------------

    @property
    def load_room(self) -> int:
        """How many more chunks the queue of loads has room for."""
        room_bytes = self.spec.runner.max_queue_bytes - self.load_bytes
        return max(0, room_bytes // self._chunk_bytes)

    @property
    def store_room(self) -> int:
        """How many more chunks the queue of stores has room for."""
        return max(0, (self._max_store_bytes - self.store_bytes) // self._chunk_bytes)

    @property
    def stores(self) -> int:
        """How many chunks are collected for stores or under way."""
        return self.store_bytes // self._chunk_bytes

    def load(
        self, keys: Sequence[OffloadKey], slots: Sequence[int], request: RequestContext
    ) -> None:
        """Collect promotions, for which there is room."""
        if not keys:
            return
        self.load_bytes += len(keys) * self._chunk_bytes
        batch = self._loads.get(request.request_id)
        if batch is None:
            batch = self._loads[request.request_id] = _Batch(request)
        batch.keys.extend(keys)
        batch.slots.extend(slots)

    def store(self, keys: list[OffloadKey], slots: list[int], request: RequestContext) -> int:
        """Collect stores, as many from the front as the queue has room for.

        Args:
            keys: the chunks; the list is the port's from now on.
            slots: a slot index for each, likewise.
            request: on whose behalf.

        Returns:
            How many were taken; the others are dropped, and counted.
        """
        count = len(keys)
        if not self.takes_stores:
            self.drop_stores(count)
            return 0
        taken = min(count, self.store_room)
        if taken < count:
            self.stats.dropped["store.queue_full"] += count - taken
            del keys[taken:], slots[taken:]
        if taken:
            self.store_bytes += taken * self._chunk_bytes
            self._stores.append(_Batch(request, keys, slots))
        return taken

    def drop_stores(self, count: int) -> None:
        """Count chunks that the tier does not get because its stores fail."""
        if count:
            self.stats.dropped["store.unavailable"] += count

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Pass the step's uses on, where the tier wants them."""
        if self._touches and self.takes_reads:
            self._touched = keys

    def take_back(self) -> tuple[list[int], list[int]]:
        """Withdraw what was collected and not handed over.

        Returns:
            The slots of the loads, and those of the stores.
        """
        loads = [slot for batch in self._loads.values() for slot in batch.slots]
        stores = [slot for batch in self._stores for slot in batch.slots]
        self.load_bytes -= len(loads) * self._chunk_bytes
        self.store_bytes -= len(stores) * self._chunk_bytes
        self._loads, self._stores, self._touched = {}, [], ()
        return loads, stores

    # --- handing over -------------------------------------------------------------------------

    def flush(
        self,
        now_s: float,
        new_job_id: Callable[[], int],
        questions: Sequence[PendingLookup],
        on_asked: Callable[[int, PendingLookup], None],
    ) -> None:
        """Hand over what was collected.

        Args:
            now_s: the time, from which deadlines count.
            new_job_id: gives the next job's id.
            questions: new ones; those that are meant for this tier are asked.
            on_asked: told of the job that answers a question.
        """
        options = self.spec.runner
        jobs = []
        for question in questions:
            if question.waiting & self.bit:
                job_id = new_job_id()
                deadline_s = now_s + options.lookup_deadline_s
                keys, request = question.keys, question.request
                jobs.append(Job(job_id, Operation.LOOKUP, keys, (), request, deadline_s))
                on_asked(job_id, question)
        for operation, batches, within_s in (
            (Operation.LOAD, self._loads.values(), options.load_deadline_s),
            (Operation.STORE, self._stores, options.store_deadline_s),
        ):
            for batch in batches:
                job = Job(
                    new_job_id(),
                    operation,
                    batch.keys,
                    batch.slots,
                    batch.request,
                    now_s + within_s,
                )
                jobs.append(job)
        if self._touched:
            deadline_s = now_s + options.store_deadline_s
            jobs.append(Job(new_job_id(), Operation.TOUCH, self._touched, (), NOBODY, deadline_s))
        if self._stale and self._erasable and not self._purging and now_s >= self._purge_at_s:
            self._purging = True
            self._purge_at_s = now_s + options.max_probe_interval_s
            deadline_s = now_s + _PURGE_DEADLINE_S
            jobs.append(Job(new_job_id(), Operation.PURGE, [EVERY_CHUNK], (), NOBODY, deadline_s))
        if jobs:
            if self._loads:
                if not self._loads_running:
                    self._load_rate.begin(now_s)
                self._loads_running += len(self._loads)
            self._loads, self._stores, self._touched = {}, [], ()
            for job in jobs:
                self.jobs.add(job)
            self.runner.submit(jobs)

    # --- taking back --------------------------------------------------------------------------

    def settled(self, job: Job, moved_bytes: int, now_s: float) -> None:
        """A job has been concluded: its bytes are no longer under way.

        Args:
            job: which.
            moved_bytes: payload that arrived.
            now_s: the time.
        """
        size_bytes = len(job.keys) * self._chunk_bytes
        if job.operation is Operation.STORE:
            self.store_bytes -= size_bytes
        elif job.operation is Operation.LOAD:
            self.load_bytes -= size_bytes
            self._loads_running -= 1
            self._load_rate.note(moved_bytes, now_s)

    def breaker_moved(self, report: BreakerMoved) -> None:
        """A breaker of the tier has opened, tries a probe, or has closed."""
        is_open = report.state is not BreakerState.CLOSED
        if report.direction is Direction.READ:
            self._reads_open = is_open
            self.stats.reads_open = int(is_open)
        else:
            self._stores_open = is_open
            self.stats.stores_open = int(is_open)

    # --- emptying -----------------------------------------------------------------------------

    def begin_purge(self) -> None:
        """Have every chunk deleted from the next hand-over on; until that is done it is not used.

        A tier that cannot list and delete its chunks is not used any more.
        """
        if not self._stale and not self._erasable:
            _log.warning(
                "tier %s cannot list and delete its chunks: a reset of all tiers puts it out of "
                "use until the engine is started anew",
                self.spec.name,
            )
        self._stale = True

    def purged(self, *, succeeded: bool) -> None:
        """A job that was to delete every chunk has been concluded."""
        # Nothing has been stored since the reset: it does not matter whether another one came.
        self._purging = False
        self._stale = not succeeded

    def expected_load_s(self, chunks: int, now_s: float) -> float:
        """How long it would take to bring so many more chunks; 0.0 where nothing tells."""
        return self._load_rate.expected_s(self.load_bytes + chunks * self._chunk_bytes, now_s)

    def event(self, keys: Sequence[OffloadKey], *, removed: bool) -> OffloadingEvent:
        """An event of this tier."""
        tier_class = self.spec.tier_class
        return OffloadingEvent(
            keys, self.spec.name, tier_class.medium, tier_class.locality, removed
        )
