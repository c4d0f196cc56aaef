"""Wrappers that observe each use of the pool's memory and each call of the eviction policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier_sdk.contract import EvictionPolicy
from kvtier_sdk.pool import HostPool
from kvtier_sdk.types import OffloadKey, Region, RequestContext


class WatchedMemory:
    def __init__(self, pool: HostPool) -> None:
        self._pool = pool
        # ``slot_of`` finds a view's slot by the view's id, so each view must stay alive.
        self._views: dict[tuple[int, int], memoryview] = {}
        self._slots: dict[int, int] = {}

    @property
    def chunk_bytes(self) -> int:
        return self._pool.chunk_bytes

    @property
    def region(self) -> Region:
        return self._pool.region

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        view = self._views.get((slot, alignment))
        if view is None:
            view = self._views[slot, alignment] = self._pool.padded_view(slot, alignment)
            self._slots[id(view)] = slot
        return view

    def slot_of(self, view: memoryview) -> int | None:
        return self._slots.get(id(view))

    def release(self) -> None:
        self._views.clear()
        self._slots.clear()


class WatchedPolicy(EvictionPolicy):
    def __init__(
        self,
        policy: EvictionPolicy,
        on_breach: Callable[[str, str], None],
        on_insert: Callable[[OffloadKey], None],
        on_remove: Callable[[OffloadKey], None],
        on_access: Callable[[Sequence[OffloadKey]], None],
    ) -> None:
        self.known: set[OffloadKey] = set()
        self.unfinished: set[str] = set()
        self._policy = policy
        self._on_breach = on_breach
        self._tell_insert = on_insert
        self._tell_remove = on_remove
        self._tell_access = on_access

    def on_insert(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        for key in keys:
            if key in self.known:
                self._complain(f"told twice of {key.hex()}")
            self.known.add(key)
            self._tell_insert(key)
        self._forward_time()
        self.unfinished.add(request.request_id)
        self._policy.on_insert(keys, request)

    def on_access(self, keys: Sequence[OffloadKey], request: RequestContext) -> None:
        for key in keys:
            if key not in self.known:
                self._complain(f"told of a use of {key.hex()}, which it does not know")
        self._tell_access(keys)
        self._forward_time()
        self.unfinished.add(request.request_id)
        self._policy.on_access(keys, request)

    def on_request_finished(self, request: RequestContext, stop: str | None) -> None:
        self._forward_time()
        self.unfinished.discard(request.request_id)
        self._policy.on_request_finished(request, stop)

    def on_remove(self, key: OffloadKey) -> None:
        if key not in self.known:
            self._complain(f"told of the end of {key.hex()}, which it does not know")
        self.known.discard(key)
        self._tell_remove(key)
        self._policy.on_remove(key)

    def choose_victims(
        self, count: int, is_evictable: Callable[[OffloadKey], bool]
    ) -> Sequence[OffloadKey]:
        self._forward_time()
        victims = self._policy.choose_victims(count, is_evictable)
        if len(victims) > count or len(set(victims)) < len(victims):
            self._complain(f"chose {len(victims)} victims, not all of them new, for {count}")
        elif not all(map(is_evictable, victims)):
            self._complain("chose a victim that is not evictable")
        return victims

    def _forward_time(self) -> None:
        self._policy.now_s = self.now_s

    def _complain(self, message: str) -> None:
        self._on_breach("the policy knows exactly the readable chunks", message)
