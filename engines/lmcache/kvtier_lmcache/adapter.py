"""An L2 adapter for LMCache's storage manager that stores objects in a kvtier tier."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvtier_lmcache.config import ADAPTER_PARAMS, KVTierL2AdapterConfig
from kvtier_lmcache.identity import (
    ObjectLayout,
    block_of,
    key_parts,
    namespace_of,
    offload_key,
    salt_digest,
)
from kvtier_lmcache.l1_memory import l1_memory
from kvtier_sdk import (
    Capability,
    ConfigError,
    KVTierError,
    OffloadKey,
    Operation,
    RequestContext,
    SystemClock,
    TierSpec,
    TierStats,
    Verdict,
    metric_samples,
    serve_metrics,
)
from kvtier_sdk.engine import (
    EngineMemory,
    EventPublisher,
    ModelTier,
    OverlappingSlots,
    Work,
    announce_blocks,
    wants_process,
)

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

_LOOKUP, _LOAD, _STORE = Operation.LOOKUP, Operation.LOAD, Operation.STORE
_DELETE = Operation.DELETE
_OK = Verdict.OK

_log = logging.getLogger("kvtier.lmcache")


@dataclass(eq=False, slots=True)
class _Task:
    """An LMCache task, split into one part for each tier."""

    task_id: int
    operation: Operation
    keys: Sequence[ObjectKey]
    succeeded: list[bool]
    ended: threading.Event | None = None  # wakes the caller of a deletion; other tasks are polled
    open_parts: int = 0
    moved_bytes: int = 0


class KVTierL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """A tier of any installed backend, for LMCache's multiprocess mode.

    Each layout of each model's objects has its own namespace and client, opened when LMCache first
    uses the layout. Transfers read and write LMCache's L1 memory directly.

    LMCache reuses an object's memory as soon as the adapter reports that the object's task is done.
    So the adapter reports a load or a store only when its I/O has ended. If a backend hangs in a
    system call, the report comes after the deadline.

    Args:
        config: the tier, and the options of the adapter.
        l1_memory_desc: LMCache's L1 memory.

    Raises:
        ConfigError: LMCache has no L1 memory that the tier can use, or a port is not free.
    """

    def __init__(
        self, config: KVTierL2AdapterConfig, l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        super().__init__()
        if not logging.getLogger("kvtier").hasHandlers():
            init_logger("kvtier")
        self._options = config.options
        self._serde = config.serde
        self._clock = SystemClock()
        self._lock = threading.Lock()
        self._task_ids = itertools.count()
        self._done: dict[Operation, dict[int, _Task]] = {_LOOKUP: {}, _LOAD: {}, _STORE: {}}
        self._tiers: dict[tuple[str, ObjectLayout], ModelTier | None] = {}
        # The layout by model, rank and group, because some of LMCache's lookups have no layout.
        self._layouts: dict[tuple[str, int, int], ObjectLayout] = {}
        # The tenants' salts by digest, because keys contain only the digests.
        self._salts: dict[bytes, str] = {}
        with ExitStack() as stack:
            self._memory = l1_memory(l1_memory_desc)
            stack.callback(self._memory.close)
            self._spec = _runnable(config.tier, self._memory)
            self._notifiers = {
                operation: stack.enter_context(create_event_notifier()) for operation in self._done
            }
            self._publisher: EventPublisher | None = None
            if self._options.events_endpoint is not None:
                self._publisher = EventPublisher(self._options, self._clock, tokens=True)
                stack.callback(self._publisher.close)
            if self._options.metrics_port is not None:
                stack.enter_context(
                    serve_metrics(
                        lambda: metric_samples(self.stats_now()),
                        port=self._options.metrics_port,
                        host=self._options.metrics_host,
                    )
                )
            self._resources = stack.pop_all()

    # --- LMCache's controllers ------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return int(self._notifiers[_STORE].fileno())

    def get_lookup_and_lock_event_fd(self) -> int:
        return int(self._notifiers[_LOOKUP].fileno())

    def get_load_event_fd(self) -> int:
        return int(self._notifiers[_LOAD].fileno())

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._submit(_STORE, keys, *self._places(keys, objects))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Pop the stores that have ended. A store fails if any of its objects fails."""
        with self._lock:
            tasks, self._done[_STORE] = self._done[_STORE], {}
        return {
            task_id: L2StoreResult(all(task.succeeded), task.moved_bytes)
            for task_id, task in tasks.items()
        }

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Look objects up, but lock none: if one is removed before its load, the load is a miss."""
        given = {
            group: ObjectLayout.of(layout.shapes, layout.dtypes, self._serde)
            for group, layout in group_layout_descs.items()
            if layout.shapes
        }
        layouts = [
            given.get(key.object_group_id) or self._layouts.get(_kind_of(key)) for key in keys
        ]
        return self._submit(_LOOKUP, keys, layouts)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._pop(_LOOKUP, task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing, because lookups do not lock objects."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._submit(_LOAD, keys, *self._places(keys, objects))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._pop(_LOAD, task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and wait until they are deleted; do nothing if the tier cannot delete."""
        if Capability.DELETE in self._spec.tier_class.capabilities:
            ended = threading.Event()
            layouts = [self._layouts.get(_kind_of(key)) for key in keys]
            self._submit(_DELETE, keys, layouts, ended=ended)
            ended.wait()

    # --- state and shutdown ---------------------------------------------------------------------

    def stats_now(self) -> list[TierStats]:
        """Return a snapshot of the counters and the state of each model's tier."""
        return [tier.stats_now() for tier in self._open_tiers()]

    def get_usage(self) -> AdapterUsage:
        """Return the usage that the tier reports. Without a report, return LMCache's own count."""
        usage = super().get_usage()
        known = [stats for stats in self.stats_now() if stats.used_bytes is not None]
        if not known:
            return usage
        # All models share one store, so their reports differ only in age and must not be added up.
        return replace(
            usage,
            total_bytes_used=max(one.used_bytes or 0 for one in known) or usage.total_bytes_used,
            total_capacity_bytes=max(stats.capacity_bytes or 0 for stats in known),
        )

    def report_status(self) -> dict[str, Any]:
        """Describe the adapter. It counts as healthy even while its store cannot be reached."""
        return {
            "is_healthy": all(tier.is_running for tier in self._open_tiers()),
            "type": type(self).__name__,
            "backend": self._spec.backend,
            "runner": "process" if wants_process(self._spec) else "thread",
            "tiers": [
                {
                    "name": stats.name,
                    "is_open": bool(stats.is_open),
                    "takes_reads": not stats.reads_open,
                    "takes_stores": not stats.stores_open,
                    "stored_chunks": stats.stored_chunks,
                    "loaded_chunks": stats.loaded_chunks,
                    "failures": dict(stats.failures),
                    "dropped": dict(stats.dropped),
                }
                for stats in self.stats_now()
            ],
        }

    def close(self) -> None:
        """Let stores finish, and close the tiers; a second call does nothing."""
        tiers = self._open_tiers()
        for tier in tiers:
            tier.close()
        for tier in tiers:
            tier.join()
        self._resources.close()

    def _places(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> tuple[list[ObjectLayout | None], list[int | None]]:
        """Return each object's layout and slot; both are ``None`` if the object cannot be moved."""
        layouts: list[ObjectLayout | None] = []
        slots: list[int | None] = []
        for key, memory_object in zip(keys, objects, strict=True):
            meta = memory_object.meta
            # LMCache's benchmark sets ``shape`` and ``dtype``, but not ``shapes`` and ``dtypes``.
            layout = ObjectLayout.of(
                meta.shapes or [meta.shape], meta.dtypes or [meta.dtype], self._serde
            )
            slot = None
            # Skip an object whose length differs from its layout's, because lookups would miss it.
            if memory_object.get_size() == layout.size_bytes:
                slot = self._memory.slot_at(memory_object.data_ptr, layout.size_bytes)
            self._layouts[_kind_of(key)] = layout
            layouts.append(None if slot is None else layout)
            slots.append(slot)
        return layouts, slots

    def _submit(
        self,
        operation: Operation,
        keys: Sequence[ObjectKey],
        layouts: Sequence[ObjectLayout | None],
        slots: Sequence[int | None] | None = None,
        *,
        ended: threading.Event | None = None,
    ) -> int:
        task = _Task(next(self._task_ids), operation, list(keys), [False] * len(keys), ended)
        slots = slots or [None] * len(keys)
        request = RequestContext(f"lmcache-{task.task_id}")
        parts: dict[ModelTier, tuple[Work, list[int]]] = {}
        for index, (key, layout, slot) in enumerate(zip(keys, layouts, slots, strict=True)):
            tier = None if layout is None else self._tier_of(key.model_name, layout)
            if tier is None:
                continue
            if tier not in parts:
                own: list[int] = []
                parts[tier] = Work(operation, request, partial(self._part_done, task, own)), own
            work, indices = parts[tier]
            indices.append(index)
            work.keys.append(offload_key(key))
            self._salts[salt_digest(key.cache_salt)] = key.cache_salt
            if slot is not None:
                work.slots.append(slot)
        task.open_parts = len(parts)
        for tier, (work, _) in parts.items():
            tier.submit(work)
        if not parts:
            self._end(task)
        return task.task_id

    def _part_done(
        self, task: _Task, indices: Sequence[int], verdicts: Sequence[Verdict], moved_bytes: int
    ) -> None:
        with self._lock:
            for index, verdict in zip(indices, verdicts, strict=True):
                task.succeeded[index] = verdict is _OK
            task.moved_bytes += moved_bytes
            task.open_parts -= 1
            has_ended = not task.open_parts
        if has_ended:
            self._end(task)

    def _end(self, task: _Task) -> None:
        """Report the end of a task to LMCache's controllers, or to the caller of :meth:`delete`."""
        keys = list(compress(task.keys, task.succeeded))
        if keys and task.operation is _LOAD:
            self._notify_keys_accessed(keys)
        if task.ended is not None:
            task.ended.set()
            return
        with self._lock:
            self._done[task.operation][task.task_id] = task
        self._notifiers[task.operation].notify()

    def _tell_change(
        self,
        model: str,
        size_bytes: int,
        counted: set[OffloadKey],
        keys: Sequence[OffloadKey],
        removed: bool,
    ) -> None:
        """Notify LMCache's listeners of objects that the tier has stored or lost."""
        # LMCache adds the size of a stored object and subtracts the size of a removed object.
        # So report size 0 if an object is stored again, or if a removed object was never counted.
        objects, sizes = [], []
        for key in keys:
            chunk_hash, rank, salt, group = key_parts(key)
            # An ObjectKey needs the salt itself. Skip objects with an unknown salt, because this
            # LMCache has no objects of that tenant.
            if salt in self._salts:
                objects.append(ObjectKey(chunk_hash, model, rank, group, self._salts[salt]))
                sizes.append(size_bytes if (key in counted) is removed else 0)
        if removed:
            counted.difference_update(keys)
            notify = self._notify_keys_deleted
        else:
            counted.update(keys)
            notify = self._notify_keys_stored
        if objects:
            notify(objects, sizes)

    def _pop(self, operation: Operation, task_id: int) -> Bitmap | None:
        with self._lock:
            task = self._done[operation].pop(task_id, None)
        if task is None:
            return None
        bitmap = Bitmap(len(task.keys))
        for index in compress(itertools.count(), task.succeeded):
            bitmap.set(index)
        return bitmap

    def _open_tiers(self) -> list[ModelTier]:
        with self._lock:
            return [tier for tier in self._tiers.values() if tier is not None]

    def _tier_of(self, model: str, layout: ObjectLayout) -> ModelTier | None:
        """Return the tier of a model's objects; ``None`` if it could not be opened."""
        with self._lock:
            if (model, layout) not in self._tiers:
                self._tiers[model, layout] = self._make_tier(model, layout)
            return self._tiers[model, layout]

    def _make_tier(self, model: str, layout: ObjectLayout) -> ModelTier | None:
        before = sum(other == model for other, _ in self._tiers)
        name = f"{self._spec.name}:{model}" + (f"#{before + 1}" if before else "")
        announce = None
        if self._publisher is not None:
            announce = announce_blocks(self._publisher.put, block_of)
        try:
            return ModelTier(
                replace(self._spec, name=name),
                OverlappingSlots(self._memory, layout.size_bytes),
                namespace_of(model, layout, self._options.namespace),
                engine="LMCache",
                clock=self._clock,
                shutdown_timeout_s=self._options.shutdown_timeout_s,
                announce=announce,
                changed=partial(self._tell_change, model, layout.size_bytes, set()),
            )
        except KVTierError as error:
            _log.error("objects of %s are not stored: %s", model, error)
            return None


def _kind_of(key: ObjectKey) -> tuple[str, int, int]:
    return key.model_name, key.kv_rank, key.object_group_id


def _runnable(spec: TierSpec, memory: EngineMemory) -> TierSpec:
    """Return the tier's specification, with a runner that can access the memory."""
    if wants_process(spec) and not memory.is_shared:
        fault = (
            "a process of its own cannot map LMCache's L1 memory: start 'lmcache server' with "
            "--no-l1-use-lazy --shm-name NAME, a name that no other server of the machine has, "
            "and without --l1-use-hugepages and --l1-devdax-path"
        )
        if spec.runner.runner == "process" or spec.tier_class.needs_process:
            raise ConfigError(f"{ADAPTER_PARAMS} tier {spec.name!r} needs a process, but {fault}")
        _log.warning("tier %s runs in threads, which may slow LMCache down: %s", spec.name, fault)
        return replace(spec, runner=spec.runner.model_copy(update={"runner": "thread"}))
    return spec
