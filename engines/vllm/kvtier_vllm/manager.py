"""Adapts kvtier's manager to vLLM's interface."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.v1.kv_offload.base import LookupResult as EngineLookupResult
from vllm.v1.kv_offload.base import OffloadingManager, PrepareStoreOutput, TierFilter
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvtier_sdk import (
    Clock,
    KVTierError,
    LookupResult,
    Namespace,
    OffloadKey,
    PoolUsage,
    RequestContext,
    SystemClock,
    TierSpec,
    TierStats,
    split_offload_key,
)
from kvtier_sdk.engine import TieringManager
from kvtier_vllm import compat
from kvtier_vllm.identity import Identity
from kvtier_vllm.metrics import StatsFeed
from kvtier_vllm.translate import (
    cache_hit_source,
    chunk_note,
    engine_event,
    engine_place,
    offloading_context,
    request_context,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import (
        LoadStoreSpec,
        OffloadingEvent,
        ReqContext,
        RequestOffloadingContext,
        ScheduleEndContext,
    )

_log = logging.getLogger("kvtier.vllm")

#: A function that opens a manager for a namespace and its tiers. The flag is true if the engine
#: waits until the tiers are open.
MakeManager: TypeAlias = Callable[
    [Namespace, Sequence[TierSpec], bool], AbstractContextManager[TieringManager]
]

_RESULTS = {result: EngineLookupResult[result.name] for result in LookupResult}
#: Interval between counts of the host pool's slots.
_USAGE_INTERVAL_S = 1.0
#: The steps that kvtier requests after its last work. The work may end during the first step, and
#: vLLM reads the metrics in the second.
_STEPS_TO_TELL = 2


@dataclass(eq=False, slots=True)
class _Request:
    """kvtier's state of a request, stored in vLLM's own record of the request.

    Attributes:
        sources: for each chunk of the latest load, the index of its tier; -1 for the host pool.
        step: the step of the request's latest lookup.
        first: the first chunk that was looked up in that step.
        is_waiting: true if the request waits, whatever further lookups in that step find.
        retried: the chunk last looked up in the wait, if the answer was ``RETRY``, else ``None``.
    """

    context: RequestContext
    sources: dict[OffloadKey, int] = field(default_factory=dict)
    step: int = -1
    first: OffloadKey = b""
    is_waiting: bool = False
    retried: OffloadKey | None = None

    def answer_waiting(self, key: OffloadKey) -> EngineLookupResult:
        """Return an answer that makes vLLM postpone the request without many more lookups."""
        # After one ``RETRY`` vLLM postpones the request, whatever the later answers are. So answer
        # ``MISS`` for the group's next chunk, to end vLLM's scan of a prefix. A ``MISS`` does not
        # end the scan of a sliding window, so its chunks get ``RETRY`` and ``MISS`` in turn.
        retried = self.retried
        if retried is None or retried == key or _group(retried) != _group(key):
            self.retried = key
            return EngineLookupResult.RETRY
        self.retried = None
        return EngineLookupResult.MISS


class KVTierOffloadingManager(OffloadingManager):  # type: ignore[misc]
    """An adapter between vLLM's offloading connector and a :class:`TieringManager`.

    vLLM may schedule up to ``steps_in_flight`` steps before the first of them has finished.
    """

    def __init__(
        self,
        make_manager: MakeManager,
        tiers: Sequence[TierSpec],
        identity: Identity,
        *,
        steps_in_flight: int,
        on_shutdown: Callable[[], None],
        clock: Clock | None = None,
    ) -> None:
        self._make_manager = make_manager
        self._identity = identity
        self._steps_in_flight = steps_in_flight
        self._clock = clock or SystemClock()
        self._whole_requests = any(tier.runner.offload_policy == "request" for tier in tiers)
        self._tiers = tiers
        self._sources = [cache_hit_source(tier.tier_class.medium) for tier in tiers]
        self._feed = StatsFeed()
        self._step = 0
        self._usage_due_s = 0.0
        # The further steps that vLLM needs to read the metrics of the last work.
        self._steps_to_tell = 0
        # Steps until all copies begun before a reset have surely ended; 0 if no reset is pending.
        self._reset_steps = 0
        # Why each answer ended, for requests that the connector has not yet reported as finished.
        self._stops: dict[str, str] = {}
        self._on_shutdown = on_shutdown
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(make_manager(identity.namespace, tiers, True))
        # This thread closes the tiers of the expected namespace if that namespace was wrong.
        self._closing: threading.Thread | None = None

    # --- a request ----------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._settle()
        request = request_context(req_context)
        tiers = self._tiers_allowed(req_context)
        try:
            self._manager.on_new_request(request, tiers)
        except KVTierError:
            # Make the id unique, because an ended request with unfinished copies may have this id.
            request = request_context(req_context, f"{req_context.req_id}#{id(req_context)}")
            self._manager.on_new_request(request, tiers)
        req_context.set_state(_Request(request))
        return offloading_context(whole_requests=self._whole_requests)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._steps_to_tell = _STEPS_TO_TELL
        stop = self._stops.pop(req_context.req_id, None)
        self._manager.on_request_finished(
            _of(req_context).context, compat.end_tokens(req_context), stop=stop
        )

    def note_stop(self, request_id: str, stop: str) -> None:
        """Record why a request's answer ended, before :meth:`on_request_finished`."""
        self._stops[request_id] = stop

    def describe(self, key: OffloadKey, make_blocks: Callable[[], Any]) -> None:
        """Record a stored or found chunk's description for routers."""
        self._manager.describe(key, lambda: chunk_note(make_blocks()))

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> EngineLookupResult:
        request = _of(req_context)
        if request.step != self._step:
            request.step = self._step
            # A new first chunk needs a new lookup, because the device now holds more of the prefix.
            is_same = request.first == key
            request.first, request.retried = key, None
            request.is_waiting = is_same and self._manager.is_waiting(request.context)
        if request.is_waiting:
            return request.answer_waiting(key)
        result = self._manager.lookup(key, request.context)
        if result is LookupResult.RETRY and self._manager.is_put_off(request.context):
            request.is_waiting = True
            return request.answer_waiting(key)
        return _RESULTS[result]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        tier = _of(req_context).sources.get(key, -1)
        return CacheHitSource.HOST if tier < 0 else self._sources[tier]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        request = _of(req_context)
        keys = list(keys)
        # vLLM does not report the use of the earlier chunks, which the device already has. Touch
        # them here, because otherwise the pool would evict the start of a prefix before the end.
        ends, loaded = compat.end_tokens(req_context), set(keys)
        first = min((ends.get(key, 0) for key in keys), default=0)
        on_device = [key for key, end in ends.items() if end <= first and key not in loaded]
        self._manager.touch(on_device, request.context)
        spec = self._manager.prepare_load(keys, request.context)
        request.sources = dict(zip(keys, spec.sources, strict=True))
        return CPULoadStoreSpec(spec.slots)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.complete_load(keys, _of(req_context).context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        self._manager.touch(keys, _of(req_context).context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        output = self._manager.prepare_store(keys, _of(req_context).context)
        if output.rejected_keys and not output.keys_to_store:
            # After ``None``, vLLM offers the chunks again in the next step.
            return None
        return PrepareStoreOutput(
            keys_to_store=output.keys_to_store,
            store_spec=CPULoadStoreSpec(output.slots),
            evicted_keys=output.evicted_keys,
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        self._manager.complete_store(keys, _of(req_context).context, success)

    # --- a step -------------------------------------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._reset_steps:
            self._reset_steps -= 1
            if not self._reset_steps:
                self._manager.on_reset_flushed()
        self._manager.on_schedule_end(context.preempted_req_ids)
        self._step += 1
        if self._steps_to_tell:
            self._steps_to_tell -= 1
            if not self._steps_to_tell:
                self._usage_due_s = -math.inf

    def has_pending_work(self) -> bool:
        # vLLM's loop calls this method before the first request, in time to reopen the tiers.
        self._settle()
        if self._reset_steps > 0 or self._manager.has_pending_work():
            self._steps_to_tell = _STEPS_TO_TELL
        # vLLM reads metrics only in a step. Without further steps, an idle engine would keep
        # showing metrics from before its work ended.
        return self._steps_to_tell > 0

    def take_events(self) -> Iterable[OffloadingEvent]:
        return [engine_event(event) for event in self._manager.take_events()]

    def get_stats(self) -> OffloadingConnectorStats | None:
        usage = None
        now_s = self._clock.now_s()
        if now_s >= self._usage_due_s:
            self._usage_due_s = now_s + _USAGE_INTERVAL_S
            usage = self._manager.usage()
        return self._feed.take(self._manager.stats, usage)

    # --- state and shutdown -------------------------------------------------------------------

    def reset_cache(self) -> None:
        self._manager.reset_cache()
        if not compat.ANNOUNCES_END_OF_RESET:
            # The next step makes the workers wait for their copies. When ``steps_in_flight`` later
            # steps have been scheduled, that step has surely ended.
            self._reset_steps = self._steps_in_flight + 2

    def on_reset_flushed(self) -> None:
        """Free the slots of copies begun before a reset. vLLM 0.33 and later call this method."""
        self._manager.on_reset_flushed()

    @property
    def stats(self) -> list[TierStats]:
        """The live counters: the host pool's first, then each tier's."""
        return self._manager.stats

    def usage(self) -> PoolUsage:
        return self._manager.usage()

    def left_over(self) -> dict[str, int]:
        """Count the pins, slots, requests, jobs and stops held now; all are 0 in an idle engine."""
        return self._manager.left_over() | {"stops": len(self._stops)}

    def shutdown(self) -> None:
        self._stack.close()
        if self._closing is not None:
            self._closing.join()
        self._on_shutdown()

    def _tiers_allowed(self, req_context: ReqContext) -> list[str] | None:
        """Return the tiers to which a client has restricted its request; ``None`` for no limit."""
        wanted = req_context.load_tier_filter
        if wanted is TierFilter.ALL:
            return None
        return [tier.name for tier in self._tiers if wanted.allows(*engine_place(tier.tier_class))]

    def _settle(self) -> None:
        """Reopen the tiers once the namespace is certain, if the expected namespace was wrong."""
        if not self._identity.settle():
            return
        _log.info("the seed of the hashes is known now: the tiers are opened under it")
        self._closing = threading.Thread(target=self._stack.close, name="kvtier-close", daemon=True)
        self._closing.start()
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(
            self._make_manager(self._identity.namespace, self._tiers, False)
        )


def _group(key: OffloadKey) -> int:
    return split_offload_key(key)[1]


def _of(req_context: ReqContext) -> _Request:
    request: _Request = req_context.get_state(_Request)
    return request
