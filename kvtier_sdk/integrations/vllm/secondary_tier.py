"""One of our tiers under vLLM's own tiering manager."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadPolicy,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult as EngineResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.errors import KVTierError
from kvtier_sdk.events import OffloadingEvent
from kvtier_sdk.integrations.vllm import compat
from kvtier_sdk.integrations.vllm.identity import THEIR_SLOTS, Identity
from kvtier_sdk.integrations.vllm.mapping import EngineSlots
from kvtier_sdk.integrations.vllm.metrics import StatsFeed, metric_definitions
from kvtier_sdk.integrations.vllm.options import SecondaryTierEntry
from kvtier_sdk.integrations.vllm.translate import (
    cache_hit_source,
    engine_event,
    engine_locality,
    engine_medium,
    request_context,
)
from kvtier_sdk.metrics import TierStats, metric_samples
from kvtier_sdk.runner import TierRunner
from kvtier_sdk.runner.breaker import BreakerState, Direction
from kvtier_sdk.runner.factory import make_runner
from kvtier_sdk.runner.jobs import (
    BreakerMoved,
    ChunksRemoved,
    IoEnded,
    Job,
    JobResult,
    JobTable,
    Operation,
    ProcessRestarted,
    Verdict,
    failure_counts,
)
from kvtier_sdk.types import Capability, OffloadKey, RequestContext

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingEvent as EngineEvent
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_OK, _NOT_FOUND = Verdict.OK, Verdict.NOT_FOUND
#: How long a drain waits before it says so and goes on waiting.
_DRAIN_PATIENCE_S = 30.0


@dataclass(eq=False, slots=True)
class _Asker:
    """What one request has been told about its chunks. Answers never outlive it.

    Attributes:
        context: the request.
        answers: whether the tier has a chunk; ``None`` while it is asked.
        new: chunks that it is still to be asked for.
        deadline_s: until when the answers that are missing are waited for.
    """

    context: RequestContext
    answers: dict[OffloadKey, bool | None] = field(default_factory=dict)
    new: list[OffloadKey] = field(default_factory=list)
    deadline_s: float = 0.0


class KVTierSecondaryTier(SecondaryTierManager):  # type: ignore[misc]
    """A tier of any installed backend, for vLLM's ``TieringOffloadingSpec``.

    vLLM's manager has no quarantine: it reuses a slot as soon as its job is reported. So a job is
    reported when its I/O has ended, not at its deadline already, which a backend that hangs in a
    system call can put off.

    Args:
        offloading_spec: vLLM's, which makes this.
        primary_kv_view: vLLM's host memory, one row a slot.
        tier_type: what the configuration calls this tier.
        backpressure_detector: vLLM's, where configured.
        options: the rest of the entry.

    Raises:
        ConfigError: an option is wrong.
        BackendError: the backend cannot be found or loaded.
        TierError: the store cannot be reached.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        compat.warn_if_untried()
        entry = SecondaryTierEntry.of_tier(offloading_spec, options)
        self._spec = entry.tier
        self._options = entry.options
        self._log = logging.getLogger(f"kvtier.tier.{self._spec.name}")
        # What vLLM's manager goes by: its own metrics, filters and figures of hits.
        tier_class = self._spec.tier_class
        self.tier_type = self._spec.name
        self.medium = engine_medium(tier_class.medium)
        self.locality = engine_locality(tier_class.locality)
        self.cache_hit_source = cache_hit_source(tier_class.medium)
        self._whole_requests = self._spec.runner.offload_policy == "request"
        self._touches = Capability.TOUCH in tier_class.capabilities
        self._wants_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._clock: Clock = SystemClock()
        self._stats = TierStats(self._spec.name, self._spec.backend)
        self._feed = StatsFeed()
        self._askers: dict[str, _Asker] = {}
        self._asked_by: dict[int, _Asker] = {}
        self._touched: dict[OffloadKey, None] = {}
        self._takes_reads = True
        self._jobs = JobTable()
        self._job_ids = itertools.count(1)
        # By our ids: vLLM's job, and what became of one that is not to be reported yet.
        self._engine_jobs: dict[int, TransferJob] = {}
        self._concluded: dict[int, JobResult] = {}
        self._finished: list[EngineResult] = []
        self._queued_bytes = {Operation.LOAD: 0, Operation.STORE: 0}
        self._events: list[OffloadingEvent] = []
        self._slots = EngineSlots(primary_kv_view)
        try:
            self._identity = Identity(
                offloading_spec.config,
                chunk_bytes=self._slots.chunk_bytes,
                slot_layout=getattr(offloading_spec, "slot_layout", THEIR_SLOTS),
                revision=entry.options.model_revision,
            )
            self._runner = self._make_runner()
            self._runner.start()
        except BaseException:
            self._slots.close()
            raise

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    # --- a request ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._identity.settle():
            self._reopen()
        self._askers[req_context.req_id] = _Asker(request_context(req_context))
        return RequestOffloadingContext(
            policy=OffloadPolicy.REQUEST_LEVEL
            if self._whole_requests
            else OffloadPolicy.CHUNK_LEVEL
        )

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._askers.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        asker = self._asker(req_context)
        if key not in asker.answers:
            if not self._takes_reads:
                return _MISS
            asker.answers[key] = None
            asker.new.append(key)
            return _RETRY
        answer = asker.answers[key]
        if answer is None:
            if key in asker.new or self._clock.now_s() <= asker.deadline_s:
                return _RETRY
            asker.answers[key] = answer = False
        return _HIT if answer else _MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        if self._touches and self._takes_reads:
            self._touched.update(dict.fromkeys(keys))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Hand over the step's questions and uses."""
        jobs = []
        within_s = self._spec.runner.lookup_deadline_s
        for asker in self._askers.values():
            if asker.new:
                keys, asker.new = asker.new, []
                job = self._job(Operation.LOOKUP, keys, (), asker.context, within_s)
                asker.deadline_s = job.deadline_s
                self._asked_by[job.job_id] = asker
                jobs.append(job)
        if self._touched:
            keys, self._touched = list(self._touched), {}
            within_s = self._spec.runner.store_deadline_s
            jobs.append(self._job(Operation.TOUCH, keys, (), RequestContext("kvtier"), within_s))
        self._submit(jobs)

    # --- jobs ---------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._take_job(Operation.STORE, job_metadata, self._spec.runner.store_deadline_s)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._take_job(Operation.LOAD, job_metadata, self._spec.runner.load_deadline_s)

    def get_finished_jobs(self) -> Iterable[EngineResult]:
        self._collect()
        finished, self._finished = self._finished, []
        return finished

    def drain_jobs(self) -> None:
        """Wait until no I/O touches a slot; what is queued is cancelled."""
        while not self._runner.drain(_DRAIN_PATIENCE_S):
            self._log.warning("waiting for I/O of the tier that does not end")

    # --- everything ---------------------------------------------------------------------------

    def take_events(self) -> Iterable[EngineEvent]:
        events, self._events = self._events, []
        return [engine_event(event) for event in events]

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._feed.take(metric_samples([self._stats]))

    @property
    def stats(self) -> TierStats:
        """What this tier has done; live, not a copy."""
        return self._stats

    @property
    def under_way(self) -> int:
        """Jobs and requests that this tier still remembers; 0 when nothing is under way."""
        return len(self._engine_jobs) + len(self._concluded) + len(self._askers)

    def shutdown(self) -> None:
        self._runner.close(self._options.shutdown_timeout_s)
        self._slots.close()

    # --- inside -------------------------------------------------------------------------------

    def _make_runner(self) -> TierRunner:
        return make_runner(
            self._spec,
            self._slots,
            namespace=self._identity.namespace,
            clock=self._clock,
            verify=self._options.verify,
        )

    def _reopen(self) -> None:
        """Open the tier under the namespace that is certain now; nothing was asked of it yet."""
        self._runner.close(self._options.shutdown_timeout_s)
        self._runner = self._make_runner()
        try:
            self._runner.start()
        except KVTierError as error:
            # It could be opened a moment ago. A runner that did not start refuses all jobs.
            self._log.error("the tier stays off: %s", error)

    def _asker(self, req_context: ReqContext) -> _Asker:
        asker = self._askers.get(req_context.req_id)
        if asker is None:
            asker = self._askers[req_context.req_id] = _Asker(request_context(req_context))
        return asker

    def _job(
        self,
        operation: Operation,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        request: RequestContext,
        within_s: float,
    ) -> Job:
        deadline_s = self._clock.now_s() + within_s
        return Job(next(self._job_ids), operation, keys, slots, request, deadline_s)

    def _submit(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._jobs.add(job)
        if jobs:
            self._runner.submit(jobs)

    def _take_job(self, operation: Operation, engine_job: TransferJob, within_s: float) -> None:
        keys = list(engine_job.keys)
        size_bytes = len(keys) * self._slots.chunk_bytes
        queued_bytes = self._queued_bytes[operation]
        if queued_bytes and queued_bytes + size_bytes > self._spec.runner.max_queue_bytes:
            self._stats.dropped[f"{operation.value}.queue_full"] += len(keys)
            self._finished.append(EngineResult(engine_job.job_id, success=False))
            if operation is Operation.LOAD:
                self._strike(engine_job, keys)
            return
        self._queued_bytes[operation] += size_bytes
        job = self._job(
            operation,
            keys,
            engine_job.chunk_ids.tolist(),
            self._asker_context(engine_job),
            within_s,
        )
        self._engine_jobs[job.job_id] = engine_job
        self._submit([job])

    def _asker_context(self, engine_job: TransferJob) -> RequestContext:
        asker = self._askers.get(engine_job.req_context.req_id)
        return asker.context if asker else request_context(engine_job.req_context)

    def _strike(self, engine_job: TransferJob, keys: Iterable[OffloadKey]) -> None:
        """A load has failed: for the request that wanted it, these chunks are not there."""
        asker = self._askers.get(engine_job.req_context.req_id)
        if asker is not None:
            asker.answers.update(dict.fromkeys(keys, False))

    def _collect(self) -> None:
        for report in self._runner.poll():
            match report:
                case JobResult():
                    self._conclude(report)
                case IoEnded():
                    self._release(report.job_id)
                case ChunksRemoved():
                    self._stats.evicted_chunks += len(report.keys)
                    self._note_event(report.keys, removed=True)
                case BreakerMoved():
                    self._breaker_moved(report)
                case ProcessRestarted():
                    self._stats.restarts += 1

    def _conclude(self, result: JobResult) -> None:
        job = self._jobs.conclude(result.job_id)
        if job is None:
            return
        if result.error is not None:
            self._stats.note_error(result.error)
        if result.retries:
            self._stats.retries[job.operation.value] += result.retries
        if job.operation is Operation.LOOKUP:
            self._answered(job, result)
        elif job.operation is not Operation.TOUCH:
            self._moved(job, result)
        if result.released:
            self._release(result.job_id)

    def _answered(self, job: Job, result: JobResult) -> None:
        stats = self._stats
        stats.found_chunks += result.verdicts.count(_OK)
        stats.absent_chunks += result.verdicts.count(_NOT_FOUND)
        self._count_failures(job, [v for v in result.verdicts if v is not _NOT_FOUND])
        answers = self._asked_by.pop(job.job_id).answers
        for key, verdict in zip(job.keys, result.verdicts, strict=True):
            # One that came too late was taken for a miss, and stays one.
            if answers.get(key) is None:
                answers[key] = verdict is _OK

    def _moved(self, job: Job, result: JobResult) -> None:
        stats, succeeded = self._stats, result.verdicts.count(_OK)
        self._count_failures(job, result.verdicts)
        self._concluded[job.job_id] = result
        if job.operation is Operation.LOAD:
            stats.loaded_chunks += succeeded
            stats.hit_chunks += succeeded
            stats.loaded_bytes += result.moved_bytes
            stats.load_s += result.duration_s
            failed = [k for k, v in zip(job.keys, result.verdicts, strict=True) if v is not _OK]
            self._strike(self._engine_jobs[job.job_id], failed)
        else:
            stats.stored_chunks += succeeded
            stats.stored_bytes += result.moved_bytes
            stats.store_s += result.duration_s
            stored = [k for k, v in zip(job.keys, result.verdicts, strict=True) if v is _OK]
            self._note_event(stored, removed=False)

    def _release(self, job_id: int) -> None:
        """The I/O has ended: now the job can be reported, and vLLM use its slots again."""
        job = self._jobs.release(job_id)
        if job is None or job_id not in self._engine_jobs:
            return
        result = self._concluded.pop(job_id)
        engine_job = self._engine_jobs.pop(job_id)
        self._queued_bytes[job.operation] -= len(job.keys) * self._slots.chunk_bytes
        done = [k for k, v in zip(job.keys, result.verdicts, strict=True) if v is _OK]
        self._finished.append(
            EngineResult(
                engine_job.job_id,
                success=len(done) == len(job.keys),
                successful_keys=done if job.operation is Operation.LOAD else None,
                transfer_time=result.duration_s,
                transfer_bytes=result.moved_bytes,
            )
        )

    def _breaker_moved(self, report: BreakerMoved) -> None:
        is_open = report.state is not BreakerState.CLOSED
        if report.direction is Direction.READ:
            self._takes_reads = not is_open
            self._stats.reads_open = int(is_open)
        else:
            self._stats.stores_open = int(is_open)

    def _count_failures(self, job: Job, verdicts: Sequence[Verdict]) -> None:
        counts = Counter(failure_counts(verdicts))
        for reason, count in counts.items():
            self._stats.failures[f"{job.operation.value}.{reason}"] += count

    def _note_event(self, keys: Sequence[OffloadKey], *, removed: bool) -> None:
        if self._wants_events and keys:
            tier_class = self._spec.tier_class
            self._events.append(
                OffloadingEvent(
                    keys, self._spec.name, tier_class.medium, tier_class.locality, removed
                )
            )
