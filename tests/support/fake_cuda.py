"""Fakes of CUDA that enforce the rules of registrations, streams, events and captures.

Copies move real bytes, because device memory is host memory here. The work on a stream runs in
order when a caller polls an event, and stops where a test holds the stream.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier_sdk.worker import cuda as cuda_module
from kvtier_sdk.worker import registration as registration_module
from kvtier_sdk.worker.gather import PageKernel
from kvtier_sdk.worker.planning import Int64s

PAGE_BYTES = mmap.PAGESIZE
REFUSED, REGISTERED_ALREADY, NOT_REGISTERED = 1, 712, 713
WITHOUT_CONTEXT = 201
#: A stream with more queued runs than this blocks its caller, as a driver may do.
MAX_QUEUED_RUNS = 1500
RELAXED, GLOBAL = 2, 0
PATIENCE_S = 30.0


class Stream:
    """A queue of functions that run in order; a function returns false if it cannot run yet."""

    runtime: FakeCUDA

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.work: deque[Callable[[], bool]] = deque()
        self.runs = 0  # queued runs that are not copied yet
        with self.runtime.changed:
            self.runtime.streams.append(self)
            self.cuda_stream = len(self.runtime.streams)

    def add(self, work: Callable[[], bool]) -> None:
        with self.runtime.changed:
            self.work.append(work)
            self.runtime.changed.notify_all()

    def hold(self) -> threading.Event:
        """Hold all later work until the returned event is passed to :meth:`FakeCUDA.release`."""
        gate = threading.Event()
        self.add(gate.is_set)
        return gate

    def wait_event(self, event: Event) -> None:
        records = event.records
        self.add(lambda: event.reached >= records)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()


class Event:
    runtime: FakeCUDA

    def __init__(self, enable_timing: bool = False) -> None:
        self.records = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.records += 1
        mine = self.records

        def reach() -> bool:
            self.reached = mine
            return True

        stream.add(reach)

    def query(self) -> bool:
        self.runtime.ask()
        self.runtime.advance()
        return self.reached >= self.records

    def synchronize(self) -> None:
        self.runtime.ask()
        with self.runtime.changed:
            while not self.query():
                assert self.runtime.changed.wait(PATIENCE_S)

    def elapsed_time(self, other: Event) -> float:
        self.runtime.ask()
        return 1.0


class FakeCUDA:
    def __init__(self, limit_bytes: int = 1 << 60) -> None:
        self.pieces: dict[int, int] = {}  # sizes of registered memory areas, by address
        self.pinned: dict[int, int] = {}  # sizes of memory allocated as pinned, by address
        self.error = 0
        self.limit_bytes = limit_bytes
        # Distance from the host address of registered memory to its device address.
        self.shift_bytes = 0
        # True while a graph is captured in global mode. A forbidden call then breaks the capture,
        # unless the calling thread is in relaxed mode.
        self.capturing = False
        self.captures_lost = 0  # captures that forbidden calls have broken
        self.failures: deque[Exception] = deque()
        self.is_lost = False  # true once the CUDA context has failed
        # For each call that queued copies, the number of bytes and the stream.
        self.copies: list[tuple[int, int]] = []
        self.in_call: Callable[[], None] = lambda: None
        self.changed = threading.Condition(threading.RLock())
        self.streams: list[Stream] = []
        self._mode = threading.local()
        self._thread = threading.local()

    # --- registrations ------------------------------------------------------------------------

    def pages(self) -> set[int]:
        return {page for piece in self.pieces.items() for page in pages_of(*piece)}

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        pages = pages_of(address, size_bytes)
        if any(not set(pages).isdisjoint(pages_of(*piece)) for piece in self.pinned.items()):
            return self._fail(REFUSED)
        if not self.pages().isdisjoint(pages):
            return self._fail(REGISTERED_ALREADY)
        if (len(self.pages()) + len(pages)) * PAGE_BYTES > self.limit_bytes:
            return self._fail(REFUSED)
        self.pieces[address] = size_bytes
        return 0

    def unregister(self, address: int) -> int:
        return 0 if self.pieces.pop(address, None) else self._fail(NOT_REGISTERED)

    def last_error(self) -> int:
        error, self.error = self.error, 0
        return error

    def device_pointer(self, found: Any, address: int, flags: int) -> int:
        if self._piece_of(address) is None:
            return self._fail(REFUSED)
        found._obj.value = address + self.shift_bytes
        return 0

    def _piece_of(self, address: int) -> int | None:
        for begin, size_bytes in self.pinned.items():
            if begin <= address < begin + size_bytes:
                return begin
        for begin, size_bytes in self.pieces.items():
            if address // PAGE_BYTES in pages_of(begin, size_bytes):
                return begin
        return None

    def _fail(self, error: int) -> int:
        self.error = error
        return error

    def hold_calls(self) -> tuple[threading.Event, threading.Event]:
        """Block calls that queue copies. A call sets the first event, and awaits the second."""
        entered, leave = threading.Event(), threading.Event()

        def stay() -> None:
            entered.set()
            assert leave.wait(PATIENCE_S)

        self.in_call = stay
        return entered, leave

    # --- copies and captures ------------------------------------------------------------------

    def exchange_capture_mode(self, mode: Any) -> int:
        before = self._capture_mode()
        self._mode.value, mode._obj.value = mode._obj.value, before
        return 0

    def _capture_mode(self) -> int:
        return int(getattr(self._mode, "value", GLOBAL))

    def ask(self) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.capturing and self._capture_mode() != RELAXED:
            self.captures_lost += 1
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        if self.failures:
            raise self.failures.popleft()

    def memory_info(self, device: object = None) -> tuple[int, int]:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 0, 0

    def copy(self, into: int, out_of: int, length_bytes: int, stream: int) -> int:
        return self._queue([(into, out_of, length_bytes)], stream)

    def copy_batch(self, into: int, out_of: int, lengths: int, count: int, *rest: Any) -> int:
        columns = [(ctypes.c_int64 * count).from_address(at)[:] for at in (into, out_of, lengths)]
        return self._queue(list(zip(*columns, strict=True)), rest[-1])

    def _queue(self, runs: list[tuple[int, int, int]], stream: int) -> int:
        self.in_call()
        if not getattr(self._thread, "has_context", False):
            return WITHOUT_CONTEXT
        for into, out_of, length_bytes in runs:
            for begin in (into, out_of):
                if self.shift_bytes and self._piece_of(begin) is not None:
                    return REFUSED
                there = self._in_host(begin)
                if self._piece_of(there) != self._piece_of(there + length_bytes - 1):
                    return REFUSED
        self.copies.append((sum(length for *_, length in runs), stream))

        def run() -> bool:
            for into, out_of, length_bytes in runs:
                ctypes.memmove(self._in_host(into), self._in_host(out_of), length_bytes)
            queue.runs -= len(runs)
            return True

        queue = self.streams[stream - 1]
        queue.runs += len(runs)
        assert queue.runs <= MAX_QUEUED_RUNS, "the caller waits for the stream"
        queue.add(run)
        return 0

    def retain_context(self, found: Any, ordinal: int) -> int:
        found._obj.value = 1 + ordinal
        return 0

    def push_context(self, context: Any) -> int:
        if self.is_lost:
            return REFUSED
        self._thread.has_context = context.value == 1
        return 0

    def pop_context(self, context: Any) -> int:
        self._thread.has_context = False
        return 0

    def _in_host(self, address: int) -> int:
        there = address - self.shift_bytes
        return address if self._piece_of(there) is None else there

    def advance(self) -> None:
        with self.changed:
            moved = True
            while moved:
                moved = False
                for stream in self.streams:
                    while stream.work and stream.work[0]():
                        stream.work.popleft()
                        moved = True

    def release(self, gate: threading.Event) -> None:
        with self.changed:
            gate.set()
            self.changed.notify_all()


def without_triton(device: torch.device) -> PageKernel:
    raise ImportError("No module named 'triton'")


class FakePageKernel(PageKernel):
    def __init__(self, launch: Callable[..., None]) -> None:
        self.has_failed = False
        self.launches: list[bool] = []
        self.failures: deque[Exception] = deque()
        self._launch = launch

    def allocate(self, size_bytes: int) -> torch.Tensor:
        # Align to 256 bytes, as CUDA aligns device memory.
        memory = torch.zeros(size_bytes + 256, dtype=torch.uint8)
        return memory[-memory.data_ptr() % 256 :][:size_bytes]

    def upload(self, numbers: Int64s, stream: Any) -> torch.Tensor:
        return torch.from_numpy(numbers.copy())

    def start(self, stream: Any, *arguments: Any, gather: bool) -> None:
        if self.failures:
            raise self.failures.popleft()
        if arguments[4]:
            self.launches.append(gather)

        def run() -> bool:
            self._launch(*arguments, gather=gather)
            return True

        stream.add(run)


def copy_pages(
    staging: int,
    block_ids: torch.Tensor,
    table: torch.Tensor,
    first_entry: int,
    entries: int,
    first_segment: int,
    segments: int,
    per_chunk: int,
    chunk_words: int,
    *,
    gather: bool,
) -> None:
    rows = table[first_segment : first_segment + segments].tolist()
    for entry, block in enumerate(block_ids[first_entry : first_entry + entries].tolist()):
        for address, stride_bytes, words, place_words in rows:
            page = address + block * stride_bytes
            at = entry // per_chunk * chunk_words + entry % per_chunk * words
            place = staging + 8 * (at + place_words - rows[0][3])
            if block >= 0:
                ends = (place, page) if gather else (page, place)
                ctypes.memmove(*ends, 8 * words)


def pages_of(address: int, size_bytes: int) -> range:
    return range(address // PAGE_BYTES, -(-(address + size_bytes) // PAGE_BYTES))


@contextmanager
def fake_cuda() -> Iterator[FakeCUDA]:
    """Replace the GPU driver, the GPU runtime and torch's calls to them with fakes."""
    runtime = FakeCUDA()
    driver: dict[str, Callable[..., int]] = {
        "cuMemcpyAsync": runtime.copy,
        "cuMemcpyBatchAsync_v2": runtime.copy_batch,
        "cuThreadExchangeStreamCaptureMode": runtime.exchange_capture_mode,
        "cuMemHostGetDevicePointer_v2": runtime.device_pointer,
        "cuDevicePrimaryCtxRetain": runtime.retain_context,
        "cuCtxPushCurrent_v2": runtime.push_context,
        "cuCtxPopCurrent_v2": runtime.pop_context,
    }
    libraries = {
        torch._C.__file__: _library({"cudaGetLastError": runtime.last_error}),
        "libcuda.so.1": _library(driver),
    }
    passed_on = SimpleNamespace(
        cudaHostRegister=runtime.register, cudaHostUnregister=runtime.unregister
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctypes, "CDLL", libraries.__getitem__)
        patch.setattr(torch.cuda, "cudart", lambda: passed_on)
        patch.setattr(torch.cuda, "device", nullcontext)
        patch.setattr(Stream, "runtime", runtime, raising=False)
        patch.setattr(Event, "runtime", runtime, raising=False)
        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch, "Stream", Stream)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "mem_get_info", runtime.memory_info)
        patch.setattr(registration_module, "_pieces", [])
        # Pretend that triton is not installed. A test can patch in another kernel.
        patch.setattr(cuda_module, "PageKernel", without_triton)
        yield runtime


def _library(functions: dict[str, Callable[..., int]]) -> SimpleNamespace:
    # Use plain functions, because bound methods do not accept attributes such as ``argtypes``.
    return SimpleNamespace(**{name: _function(call) for name, call in functions.items()})


def _function(call: Callable[..., int]) -> Callable[..., int]:
    return lambda *arguments: call(*arguments)
