"""Opens a manager over real tiers, in threads or processes, and plays an engine's steps."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtier_sdk import (
    Clock,
    HostPool,
    Namespace,
    OffloadKey,
    RequestContext,
    TieringConfig,
    TierSpec,
)
from kvtier_sdk.engine import TieringManager, open_manager, open_pool

CHUNK_BYTES = 4096
_WAIT_S = 0.01
_STEPS = 3000


class Live:
    """A stand-in for an engine. Each step waits briefly for a report from a tier."""

    def __init__(self, manager: TieringManager, pool: HostPool, reported: threading.Event) -> None:
        self.manager = manager
        self.pool = pool
        self._reported = reported

    def step(self) -> None:
        self._reported.clear()
        self.manager.on_schedule_end()
        self._reported.wait(_WAIT_S)

    def begin(self, name: str) -> RequestContext:
        request = RequestContext(name)
        self.manager.on_new_request(request)
        return request

    def store(self, request: RequestContext, *keys: OffloadKey) -> None:
        output = self.manager.prepare_store(keys, request)
        for key, slot in zip(output.keys_to_store, output.slots, strict=True):
            self.pool.view(slot)[:] = content(key, self.pool.chunk_bytes)
        self.manager.complete_store(output.keys_to_store, request)
        self.rest()

    def settle(self, request: RequestContext, *keys: OffloadKey) -> list[str]:
        for _ in range(_STEPS):
            names = [self.manager.lookup(key, request).name for key in keys]
            if not {"RETRY", "HIT_PENDING"} & set(names):
                return names
            self.step()
        raise AssertionError(f"still {names}")

    def load(self, request: RequestContext, *keys: OffloadKey) -> None:
        spec = self.manager.prepare_load(keys, request)
        for key, slot in zip(keys, spec.slots, strict=True):
            assert self.pool.view(slot) == content(key, self.pool.chunk_bytes)
        self.manager.complete_load(keys, request)

    def there_and_back(self, request: RequestContext, *keys: OffloadKey, window: int = 8) -> None:
        windows = [keys[start : start + window] for start in range(0, len(keys), window)]
        for some in windows:
            self.store(request, *some)
        for some in windows:
            assert self.settle(request, *some) == ["HIT"] * len(some)
            self.load(request, *some)
            self.rest()

    def rest(self) -> None:
        for _ in range(_STEPS):
            self.step()
            if not self.manager.has_pending_work():
                return
        raise AssertionError("the tiers do not finish")


def content(key: OffloadKey, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    return (key * chunk_bytes)[:chunk_bytes]


@contextmanager
def live(
    tiers: Sequence[str | TierSpec],
    *,
    namespace: dict[str, object] | None = None,
    events: bool = False,
    clock: Clock | None = None,
    **options: Any,
) -> Iterator[Live]:
    """Yield an engine over opened tiers, with long deadlines because the machine may be busy."""
    patience = {"lookup_deadline": "20s", "load_deadline": "20s"}
    specs = [
        TierSpec.from_url(tier, **patience) if isinstance(tier, str) else tier for tier in tiers
    ]
    # Never skip a load in favour of recomputing, because nothing is computed here.
    options = {"recompute": "1000d", "chunk_bytes": CHUNK_BYTES, **options, "tiers": specs}
    config = TieringConfig.from_dict({"slots": 64, **options}, where="test")
    reported = threading.Event()
    with (
        open_pool(config) as pool,
        open_manager(
            pool,
            config,
            Namespace(namespace or {"model": "m"}),
            clock=clock,
            events=events,
            notify=reported.set,
        ) as manager,
    ):
        yield Live(manager, pool, reported)
