"""A storage backend of SGLang's hierarchical cache that stores pages in a kvtier tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvtier_sdk import Operation, SystemClock, TierStats, metric_samples, serve_metrics
from kvtier_sdk.engine import EventPublisher, ModelTier, announce_blocks
from kvtier_sglang.config import read_config
from kvtier_sglang.identity import PageIdentity
from kvtier_sglang.pages import PlacedPages, pages_of
from kvtier_sglang.pool_tier import PoolTier

if TYPE_CHECKING:
    import torch
    from sglang.srt.observability.metrics_collector import StorageMetrics

_LOAD, _STORE = Operation.LOAD, Operation.STORE
_KV = str(PoolName.KV)


class KVTierHiCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """A tier of any installed backend, for SGLang's ``--hicache-storage-backend dynamic``.

    Each of SGLang's host pools has its own namespace and client. With ``interface_v1`` and a layout
    whose pages are contiguous (``page_first``, ``page_first_direct``, ``page_head``), the tier runs
    in threads and reads and writes pages in place. Otherwise pages are copied through shared
    memory, and the tier may run in its own process.

    SGLang's threads call the methods, and reuse a page's memory as soon as a call returns. So a
    call returns only when its I/O has ended. If a backend hangs in a system call, the call returns
    after the deadline.

    Args:
        storage_config: SGLang's configuration; ``extra_config`` contains kvtier's option ``tier``.
        kwargs: not used.

    Raises:
        ConfigError: an option is wrong, or a port is not free.
        BackendError: the backend cannot be found or loaded.
    """

    def __init__(
        self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._config = storage_config
        self._spec, self._options, self._zero_copy = read_config(storage_config.extra_config)
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._tiers: dict[str, PoolTier] = {}
        self._moved: dict[Operation, list[tuple[int, float]]] = {_LOAD: [], _STORE: []}
        with ExitStack() as stack:
            rank = storage_config.pp_rank * storage_config.tp_size + storage_config.tp_rank
            self._publisher: EventPublisher | None = None
            if (options := self._options).events_endpoint is not None:
                self._publisher = EventPublisher(options, self._clock, rank=rank, tokens=True)
                stack.callback(self._publisher.close)
            if self._options.metrics_port is not None:
                stack.enter_context(
                    serve_metrics(
                        lambda: metric_samples(self.stats_now()),
                        port=self._options.metrics_port + rank,
                        host=self._options.metrics_host,
                    )
                )
            self._resources = stack.pop_all()

    # --- host pools -----------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier of the KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Open the tier of another pool, such as the pool of recurrent state."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(str(host_pool_name), host_pool)

    # --- pages of all pools ---------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: Any = None,
    ) -> PoolTransferResult:
        """Return how many leading pages can be restored, and each pool's number of hits."""
        kv_pages = self.batch_exists(keys)
        hits = {PoolName.KV: kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            # Skip a pool with ``BLOCK_GROUPS``, because the KV pool's pages can be reused without
            # that pool's pages.
            if not restorable or transfer.hit_policy is PoolHitPolicy.BLOCK_GROUPS:
                continue
            found = self._tier_of(transfer.name).exist(keys[:kv_pages])
            needed = kv_pages
            if transfer.hit_policy is PoolHitPolicy.TRAILING_PAGES:
                needed = max(1, len(transfer.keys or ()))
            restorable = [n for n in restorable if all(found[max(0, n - needed) : n])]
            hits[transfer.name] = restorable[-1] if restorable else 0
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools; return each pool's results, true for each loaded page."""
        return {t.name: self._move(_LOAD, t.name, t.keys, t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: Any = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools; return each pool's results, true for each stored page."""
        return {t.name: self._move(_STORE, t.name, t.keys, t.host_indices) for t in transfers}

    # --- pages of the KV pool -------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Return the number of pages in the tier before the first missing page."""
        return sum(takewhile(bool, self._tier_of(_KV).exist(keys)))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Load pages; return true for each loaded page."""
        return self._move(_LOAD, _KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        """Store pages; return true for each stored page."""
        return self._move(_STORE, _KV, keys, host_indices)

    def batch_get(
        self,
        keys: list[str],
        target_locations: Sequence[torch.Tensor] | None = None,
        target_sizes: Any = None,
    ) -> list[torch.Tensor | None]:
        """Load flat pages into tensors; return ``None`` for each page that was not loaded."""
        targets = list(target_locations or ())
        return [
            target if is_there else None
            for target, is_there in zip(
                targets, self._move_tensors(_LOAD, keys, targets), strict=True
            )
        ]

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Load a flat page into a tensor; return the tensor, or ``None`` after a failure."""
        if target_location is None:
            return None
        return self.batch_get([key], [target_location])[0]

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[torch.Tensor] | None = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store flat pages; return true if all were stored."""
        return all(self._move_tensors(_STORE, keys, list(values or ())))

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a flat page; return true if it was stored."""
        return value is not None and self.batch_set([key], [value])

    # --- state and shutdown ---------------------------------------------------------------------

    def clear(self) -> None:
        """Delete all ranks' pages of this model in the background. Lookups no longer find them."""
        for tier in self._open_tiers():
            tier.chunks.purge()

    def get_stats(self) -> StorageMetrics:
        """Return pages and GB/s of each transfer since the last call, for SGLang's histograms."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._moved = self._moved, {_LOAD: [], _STORE: []}
        return StorageMetrics(
            [pages for pages, _ in moved[_LOAD]],
            [pages for pages, _ in moved[_STORE]],
            [rate for _, rate in moved[_LOAD]],
            [rate for _, rate in moved[_STORE]],
        )

    def stats_now(self) -> list[TierStats]:
        """Return a snapshot of the counters and the state of each pool's tier."""
        return [tier.chunks.stats_now() for tier in self._open_tiers()]

    def close(self) -> None:
        """Let stores finish, and close the tiers; a second call does nothing."""
        with self._lock:
            tiers, self._tiers = self._tiers, {}
        for tier in tiers.values():
            tier.chunks.close()
        for tier in tiers.values():
            tier.close()
        self._resources.close()

    def _register(self, name: str, pool: Any) -> None:
        with self._lock:
            if name not in self._tiers:
                self._tiers[name] = self._make_tier(name, pool)

    def _make_tier(self, name: str, pool: Any) -> PoolTier:
        spec = self._spec
        is_thread = spec.runner.runner != "process" and not spec.tier_class.needs_process
        pages = pages_of(pool, in_place=self._zero_copy and is_thread)
        identity = PageIdentity(self._config, pool, name, self._options.namespace)
        if isinstance(pages, PlacedPages):
            spec = replace(spec, runner=spec.runner.model_copy(update={"runner": "thread"}))
        # Announce only the KV pool's pages, because other pools' pages have the same hashes.
        announce = None
        if self._publisher is not None and name == _KV:
            announce = announce_blocks(self._publisher.put, partial(identity.block_of, pages.parts))
        model = self._config.model_name or "model"
        try:
            tier = ModelTier(
                replace(spec, name=f"{spec.name}:{model}" + ("" if name == _KV else f"/{name}")),
                pages.memory,
                identity.namespace,
                engine="SGLang",
                clock=self._clock,
                shutdown_timeout_s=self._options.shutdown_timeout_s,
                announce=announce,
            )
        except BaseException:
            pages.close()
            raise
        return PoolTier(tier, pages, identity)

    def _tier_of(self, name: str) -> PoolTier:
        with self._lock:
            return self._tiers[str(name)]

    def _open_tiers(self) -> list[PoolTier]:
        with self._lock:
            return list(self._tiers.values())

    def _move(
        self,
        operation: Operation,
        name: str,
        keys: Sequence[str] | None,
        indices: torch.Tensor | None,
    ) -> list[bool]:
        keys = keys or []
        if indices is None:
            return [False] * len(keys)
        tier = self._tier_of(name)
        return self._timed(operation, tier, lambda: tier.move(operation, keys, indices))

    def _move_tensors(
        self, operation: Operation, keys: Sequence[str], tensors: Sequence[torch.Tensor]
    ) -> list[bool]:
        tier = self._tier_of(_KV)
        return self._timed(operation, tier, lambda: tier.move_tensors(operation, keys, tensors))

    def _timed(
        self, operation: Operation, tier: PoolTier, move: Callable[[], list[bool]]
    ) -> list[bool]:
        started_s = self._clock.now_s()
        moved = move()
        pages = sum(moved)
        if pages and self._config.enable_storage_metrics:
            duration_s = max(self._clock.now_s() - started_s, 1e-6)
            with self._lock:
                self._moved[operation].append((pages, pages * tier.page_bytes / duration_s / 1e9))
        return moved
