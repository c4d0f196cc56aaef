"""kvtier's eviction policy, for the host memory of vLLM's own manager."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING

from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvtier_sdk import Clock, OffloadKey, RequestContext, SystemClock, load_policy
from kvtier_vllm.translate import request_context

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import ReqContext

#: True if vLLM reports accesses while a request runs (since 0.33), not only at its end.
TELLS_ACCESSES = hasattr(CachePolicy, "on_request_access")


@dataclass(eq=False, slots=True)
class _Request:
    """A request, and the number of its chunks that are not readable yet."""

    context: RequestContext
    unread: int = 0
    is_over: bool = False


class KVTierCachePolicy(CachePolicy):  # type: ignore[misc]
    """The eviction policy ``returns``, adapted to vLLM's option ``eviction_policy``.

    vLLM gives a policy no hints, and does not tell it why answers end.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._clock: Clock = SystemClock()
        self.clear()

    def clear(self) -> None:
        self._policy = load_policy("returns")()
        self._policy.open(self.cache_capacity)
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        # Requests by id. An entry stays if vLLM never reports the end of the request, as can happen
        # after a cache reset.
        self._running: dict[str, _Request] = {}
        # Chunks not yet reported to the policy, and their requests.
        self._new: dict[OffloadKey, _Request] = {}
        # The request of each chunk about to be inserted. insert() of vLLM 0.32 gets no request.
        self._offered: dict[OffloadKey, _Request] = {}

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(
        self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None
    ) -> None:
        request = self._offered.pop(key, None)
        if req_context is not None:
            request = self._request(req_context)
        elif request is None:
            request = _Request(RequestContext(request_id=""), is_over=True)
        self._chunks[key] = chunk
        self._new[key] = request
        request.unread += 1

    def mark_evictable(self, key: OffloadKey) -> None:
        if key in self._new:
            self._count_down(self._new[key])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        # Report the chunk now, to remove it from ``_new``. Otherwise, the next mark_evictable()
        # would count the chunk a second time.
        if key in self._new:
            self._tell_new()

    def remove(self, key: OffloadKey) -> None:
        del self._chunks[key]
        request = self._new.pop(key, None)
        if request is None:
            self._policy.on_remove(key)
        else:
            self._count_down(request)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._tell_new()
        known = [key for key in keys if key in self._chunks and key not in self._new]
        self._policy.on_access(known, self._request(req_context).context)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._offered.update(dict.fromkeys(keys, self._request(req_context)))

    on_request_access = touch

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        keys = list(chain.from_iterable(key_groups))
        reused = () if TELLS_ACCESSES else (key for key in keys if key in reused_keys)
        self.touch(reused, req_context)
        for key in keys:
            self._offered.pop(key, None)
        request = self._running.pop(req_context.req_id)
        request.is_over = True
        self._end_if_over(request)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        self._tell_new()
        chunks = self._chunks
        victims = self._policy.choose_victims(
            n, lambda key: key not in protected and not chunks[key].ref_cnt
        )
        if len(victims) < n:
            return None
        for key in victims:
            self._policy.on_remove(key)
        return [(key, chunks.pop(key)) for key in victims]

    def _request(self, req_context: ReqContext) -> _Request:
        request = self._running.get(req_context.req_id)
        if request is None:
            request = self._running[req_context.req_id] = _Request(request_context(req_context))
        return request

    def _count_down(self, request: _Request) -> None:
        request.unread -= 1
        if not request.unread:
            self._tell_new()
            self._end_if_over(request)

    def _end_if_over(self, request: _Request) -> None:
        if request.is_over and not request.unread:
            self._policy.on_request_finished(request.context, None)

    def _tell_new(self) -> None:
        """Pass the current time and the newly readable chunks to the policy."""
        self._policy.now_s = self._clock.now_s()
        ready = [key for key in self._new if self._chunks[key].is_ready]
        for request, keys in groupby(ready, self._new.__getitem__):
            self._policy.on_insert(list(keys), request.context)
        for key in ready:
            del self._new[key]
