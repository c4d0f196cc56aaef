"""Adapts a kvtier tier to vLLM's own tiering manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.base import JobResult as EngineResult
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from kvtier_sdk import (
    Clock,
    Job,
    OffloadKey,
    Operation,
    RequestContext,
    SystemClock,
    TierSpec,
    TierStats,
    Verdict,
)
from kvtier_sdk.engine import (
    EngineSlots,
    EventPublisher,
    Savings,
    TierClient,
    TierListener,
    open_tier,
)
from kvtier_vllm import compat
from kvtier_vllm.engine_log import join_engine_log
from kvtier_vllm.identity import THEIR_SLOTS, Identity
from kvtier_vllm.metrics import StatsFeed, metric_definitions
from kvtier_vllm.options import SecondaryTierEntry
from kvtier_vllm.translate import (
    cache_hit_source,
    engine_event,
    engine_place,
    offloading_context,
    request_context,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingEvent as EngineEvent
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.tiering.base import TransferJob

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
_OK = Verdict.OK
_log = logging.getLogger("kvtier.vllm")

#: Interval between warnings while a drain does not end.
_DRAIN_TIMEOUT_S = 30.0


@dataclass(eq=False, slots=True)
class _Request:
    """The tier's answers to one request, kept until the request ends.

    Attributes:
        answers: for each chunk, true if the tier has it; ``None`` until the tier answers.
        new: chunks to look up in the tier at the end of the step.
        deadline_s: time after which missing answers count as misses.
        scheduled_s: start of the computation; ``None`` before the start and after the first store.
    """

    context: RequestContext
    answers: dict[OffloadKey, bool | None] = field(default_factory=dict)
    new: list[OffloadKey] = field(default_factory=list)
    deadline_s: float = 0.0
    scheduled_s: float | None = None


class KVTierSecondaryTier(SecondaryTierManager, TierListener):  # type: ignore[misc]
    """A tier of any installed backend, for vLLM's ``TieringOffloadingSpec``.

    vLLM's manager reuses a slot as soon as the slot's job is reported. Therefore a job is reported
    only when its I/O has ended, even if that is after its deadline. A backend that hangs in a
    system call can delay the report.

    Args:
        offloading_spec: vLLM's spec, which makes this tier.
        primary_kv_view: vLLM's host memory, one row per slot.
        tier_type: the tier's type in the configuration.
        backpressure_detector: vLLM's detector, if one is configured.
        options: the other options of the entry.

    Raises:
        ConfigError: an option is wrong, or a port is not free.
        BackendError: the backend cannot be found or loaded.
        TierError: the store refuses the credentials, or is required and cannot be reached.
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
        join_engine_log()
        compat.warn_if_untried()
        compat.tell_traces()
        entry = SecondaryTierEntry.of_tier(offloading_spec, options)
        self._spec = entry.tier
        self._options = entry.options
        # vLLM's manager reads these attributes for its metrics, filters and counts of hits.
        tier_class = self._spec.tier_class
        self.tier_type = self._spec.name
        self.medium, self.locality = engine_place(tier_class)
        self.cache_hit_source = cache_hit_source(tier_class.medium)
        self._whole_requests = self._spec.runner.offload_policy == "request"
        self._wants_events = bool(offloading_spec.kv_events_config.enable_kv_cache_events)
        self._clock: Clock = SystemClock()
        self._feed = StatsFeed()
        self._requests: dict[str, _Request] = {}
        self._touched: dict[OffloadKey, None] = {}
        self._finished: list[EngineResult] = []
        # This thread closes the tier of the expected namespace if that namespace was wrong.
        self._closing: threading.Thread | None = None
        self._slots = EngineSlots("vLLM", primary_kv_view)
        self._resources = ExitStack()
        self._resources.callback(self._slots.close)
        try:
            self._publisher: EventPublisher | None = None
            if entry.options.events_endpoint is not None:
                rank = offloading_spec.config.parallel.data_parallel_index
                self._publisher = EventPublisher(entry.options, self._clock, rank=rank)
                self._resources.callback(self._publisher.close)
            self._identity = Identity(
                offloading_spec.config,
                chunk_bytes=self._slots.chunk_bytes,
                slot_layout=getattr(offloading_spec, "slot_layout", THEIR_SLOTS),
                declared=entry.options,
            )
            self._open(self._spec)
        except BaseException:
            self._resources.close()
            raise

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    # --- a request ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._settle()
        self._requests[req_context.req_id] = _Request(request_context(req_context))
        return offloading_context(whole_requests=self._whole_requests)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = self._request(req_context)
        if key not in request.answers:
            if not self._tier.takes_reads:
                self._tier.drop_lookups(1)
                return _MISS
            # vLLM loads a chunk after a hit. Answer at once only if no earlier chunk awaits an
            # answer, because the load is useless if an earlier chunk is missing.
            if not request.new and self._tier.knows(key):
                request.answers[key] = True
                return _HIT
            request.answers[key] = None
            request.new.append(key)
            return _RETRY
        answer = request.answers[key]
        if answer is None:
            if key in request.new or self._clock.now_s() <= request.deadline_s:
                return _RETRY
            request.answers[key] = answer = False
        return _HIT if answer else _MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._touched.update(dict.fromkeys(keys))

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Pass the step's lookups and touches to the tier."""
        now_s = self._clock.now_s()
        for req_id in context.new_req_ids:
            if req_id in self._requests:
                self._requests[req_id].scheduled_s = now_s
        chunk_s = self._savings.rate.chunk_s
        for request in self._requests.values():
            if request.new:
                worth_s = inf if chunk_s is None else len(request.new) * chunk_s
                job = self._tier.lookup(request.new, request.context, tag=request, worth_s=worth_s)
                request.new = []
                request.deadline_s = job.deadline_s
        if self._touched:
            self._tier.touch(list(self._touched))
            self._touched = {}
        self._tier.flush()
        self._savings.step_ended(now_s)

    def has_pending_work(self) -> bool:
        # vLLM's loop calls this method before the first request, in time to reopen the tier.
        self._settle()
        return False

    # --- jobs ---------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        request = self._requests.get(job_metadata.req_context.req_id)
        if request is not None and request.scheduled_s is not None:
            # The duration includes the computation of other requests, because this request waits
            # for them too.
            duration_s = self._clock.now_s() - request.scheduled_s
            self._savings.rate.note(len(job_metadata.keys), duration_s)
            request.scheduled_s = None
        self._submit(self._tier.store, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        if not self._submit(self._tier.load, job_metadata):
            self._strike(job_metadata, job_metadata.keys)

    def get_finished_jobs(self) -> Iterable[EngineResult]:
        self._tier.poll()
        finished, self._finished = self._finished, []
        return finished

    def drain_jobs(self) -> None:
        """Cancel queued jobs, and wait until no I/O touches a slot."""
        while not self._tier.drain(_DRAIN_TIMEOUT_S):
            _log.warning("tier %s: waiting for I/O that does not end", self._spec.name)

    # --- state and shutdown -------------------------------------------------------------------

    def take_events(self) -> Iterable[EngineEvent]:
        return [engine_event(event) for event in self._tier.take_events()]

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._feed.take([self._tier.stats])

    @property
    def stats(self) -> TierStats:
        """The live counters of the tier."""
        return self._tier.stats

    @property
    def under_way(self) -> int:
        """The number of jobs and requests that this tier still tracks."""
        return self._tier.jobs.unreleased + len(self._finished) + len(self._requests)

    def shutdown(self) -> None:
        self._opened.close()
        if self._closing is not None:
            self._closing.join()
        self._resources.close()

    # --- the tier's reports -------------------------------------------------------------------

    def answered(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        answers = job.tag.answers
        for key, verdict in zip(job.keys, verdicts, strict=True):
            # A late answer must not change the miss that :meth:`lookup` has reported after the
            # deadline.
            if answers.get(key) is None:
                answers[key] = verdict is _OK

    def loaded(self, tier: TierClient, job: Job, verdicts: Sequence[Verdict]) -> None:
        failed = [k for k, v in zip(job.keys, verdicts, strict=True) if v is not _OK]
        loaded = [k for k, v in zip(job.keys, verdicts, strict=True) if v is _OK]
        self._savings.note(loaded, [-1] * len(loaded))
        self._strike(job.tag, failed)

    def released(self, tier: TierClient, job: Job) -> None:
        """Report a job to vLLM, which may then reuse the job's slots."""
        result = job.result
        if job.tag is None or result is None or job.operation is Operation.LOOKUP:
            return
        done = [k for k, v in zip(job.keys, result.verdicts, strict=True) if v is _OK]
        self._finished.append(
            EngineResult(
                job.tag.job_id,
                success=len(done) == len(job.keys),
                successful_keys=done if job.operation is Operation.LOAD else None,
                transfer_time=result.duration_s,
                transfer_bytes=result.moved_bytes,
            )
        )

    def _open(self, spec: TierSpec) -> None:
        publisher = self._publisher
        self._opened = ExitStack()
        self._tier = self._opened.enter_context(
            open_tier(
                replace(spec, verify=self._options.verify),
                self._slots,
                self._identity.namespace,
                self,
                clock=self._clock,
                events=self._wants_events,
                announce=None if publisher is None else publisher.source(),
                shutdown_timeout_s=self._options.shutdown_timeout_s,
                engine="vLLM",
            )
        )
        self._savings = Savings(self._tier.stats, self._identity.namespace, None)

    def _settle(self) -> None:
        """Reopen the tier once the namespace is certain, if the expected namespace was wrong."""
        if not self._identity.settle():
            return
        name = self._spec.name
        _log.info("tier %s: the seed of the hashes is known now, and it is opened under it", name)
        self._closing = threading.Thread(
            target=self._opened.close, name=f"kvtier-{name}-close", daemon=True
        )
        self._closing.start()
        self._open(self._spec.in_background())

    def _request(self, req_context: ReqContext) -> _Request:
        request = self._requests.get(req_context.req_id)
        if request is None:
            request = self._requests[req_context.req_id] = _Request(request_context(req_context))
        return request

    def _submit(self, collect: Callable[..., Job | None], engine_job: TransferJob) -> bool:
        """Submit a job at once; if it is refused, report a failure and return false."""
        request = self._requests.get(engine_job.req_context.req_id)
        context = request.context if request else request_context(engine_job.req_context)
        slots = engine_job.chunk_ids.tolist()
        if collect(list(engine_job.keys), slots, context, whole=True, tag=engine_job) is None:
            self._finished.append(EngineResult(engine_job.job_id, success=False))
            return False
        self._tier.flush()
        return True

    def _strike(self, engine_job: TransferJob, keys: Iterable[OffloadKey]) -> None:
        """Record chunks with failed loads as misses of the job's request."""
        request = self._requests.get(engine_job.req_context.req_id)
        if request is not None:
            request.answers.update(dict.fromkeys(keys, False))
