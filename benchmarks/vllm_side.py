"""vLLM's tiering manager, measured by ``scheduler.py``."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupPhase
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from kvtier_sdk.cli.replay import ReplayRequest

_POLL_S = 50e-6


class VLLMSide:
    """``TieringOffloadingManager`` over vLLM's LRU primary tier and one tier in memory."""

    hit = LookupResult.HIT
    miss = LookupResult.MISS

    def __init__(self, slots: int, chunk_bytes: int, *, threaded: bool) -> None:
        self._chunk_bytes = chunk_bytes
        region = SharedOffloadRegion(
            engine_id=f"kvtier-peer-{os.getpid()}",
            num_chunks=slots,
            rank=None,
            kv_bytes_per_chunk=chunk_bytes,
            cpu_page_size=chunk_bytes,
        )
        primary = CPUPrimaryTierOffloadingManager(num_chunks=slots, mmap_region=region)
        view = primary.get_kv_memoryview()
        self._flat = view.cast("B")
        self._tier = (ThreadedTier if threaded else SteppedTier)(view, self._flat)
        self.manager = TieringOffloadingManager(primary, [self._tier])

    def context(self, request: ReplayRequest) -> ReqContext:
        """Return a context like the connector's, with the request's id and the keys' positions."""
        context = ReqContext(request.request_id)
        for position, key in enumerate(request.keys, 1):
            context.set_offload_key_position(OffloadKey(key), position)
        return context

    def load_slots(self, spec: Any) -> list[int]:
        return spec.chunk_ids.tolist()

    def store_slots(self, output: Any) -> tuple[list[bytes], list[int]]:
        if output is None:  # the pool is full
            return [], []
        return output.keys_to_store, output.store_spec.chunk_ids.tolist()

    def view(self, slot: int) -> memoryview:
        return self._flat[slot * self._chunk_bytes :][: self._chunk_bytes]

    def step_end_arguments(self, scheduled: Sequence[str]) -> tuple[ScheduleEndContext]:
        return (ScheduleEndContext(new_req_ids=scheduled, preempted_req_ids=()),)

    def run_model(self) -> None:
        while not self._tier.is_settled():
            time.sleep(_POLL_S)
        # Read the statistics after each step, as an engine does.
        self.manager.get_stats()

    def close(self) -> None:
        self._flat.release()
        self.manager.shutdown()


class SteppedTier(SecondaryTierManager):
    """A tier over a dictionary. It answers lookups at once and copies chunks between steps."""

    medium = Medium.CPU

    def __init__(self, view: memoryview, flat: memoryview) -> None:
        super().__init__(None, view, "memory")
        self._slots = np.frombuffer(flat, np.uint8).reshape(-1, self.block_size_bytes)
        self._objects: dict[OffloadKey, np.ndarray] = {}
        self._waiting: list[TransferJob] = []
        # A deque, because one thread may append results while another thread removes some.
        self._finished: deque[JobResult] = deque()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return LookupResult.HIT if key in self._objects else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._waiting.append(job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self.submit_store(job_metadata)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        while self._finished:
            results.append(self._finished.popleft())
        return results

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        while not self.is_settled():
            time.sleep(0.001)

    def is_settled(self) -> bool:
        """Run all waiting jobs, so that none is left, and return true."""
        for job in self._waiting:
            self._work(job)
        self._waiting.clear()
        return True

    def shutdown(self) -> None:
        del self._slots

    def _work(self, job: TransferJob) -> None:
        for key, slot in zip(job.keys, job.chunk_ids.tolist(), strict=True):
            if job.is_promotion:
                self._slots[slot] = self._objects[key]
            else:
                self._objects[key] = self._slots[slot].copy()
        moved_bytes = len(job.keys) * self.block_size_bytes
        self._finished.append(JobResult(job.job_id, True, transfer_bytes=moved_bytes))


class ThreadedTier(SteppedTier):
    """A tier with ``AsyncLookupManager`` and a thread, like vLLM's tiers for files and objects."""

    def __init__(self, view: memoryview, flat: memoryview) -> None:
        super().__init__(view, flat)
        self._lookups = _Lookups(self._objects)
        self._jobs: queue.SimpleQueue[TransferJob | None] = queue.SimpleQueue()
        self._submitted = 0
        self._done = 0
        self._thread = threading.Thread(target=self._serve, name="peer tier", daemon=True)
        self._thread.start()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        result = self._lookups.lookup(key, req_context)
        if result is None:
            return LookupResult.RETRY
        return LookupResult.HIT if result else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submitted += 1
        self._jobs.put(job_metadata)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def is_settled(self) -> bool:
        return self._done == self._submitted and self._lookups.are_answered()

    def shutdown(self) -> None:
        self._lookups.shutdown()
        self._jobs.put(None)
        self._thread.join()
        super().shutdown()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._work(job)
            self._done += 1


class _Lookups(AsyncLookupManager):
    def __init__(self, objects: Collection[OffloadKey]) -> None:
        super().__init__("memory")
        self._objects = objects

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return [key in self._objects for key in keys]

    def are_answered(self) -> bool:
        """Return true if the last flush was answered; all its answers arrive as one queue item."""
        return self._pending_results.qsize() > 0 or not any(
            state.phase is LookupPhase.IN_FLIGHT for state in self._lookup_state.values()
        )
