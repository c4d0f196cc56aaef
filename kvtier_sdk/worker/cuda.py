"""The device for CUDA tensors, which copies on separate streams."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.device import Copy, Device, StreamOrEvent
from kvtier_sdk.worker.driver import ORDER_ANY, ORDER_STREAM, CUDADriver
from kvtier_sdk.worker.gather import Gatherer, PageKernel, StagedPiece
from kvtier_sdk.worker.planning import PIECE_RUNS, CopyPlan, GroupLayout, HostLayout, JobPlan
from kvtier_sdk.worker.registration import RefusedError, Registration

_log = logging.getLogger("kvtier.worker")

#: Approximate limit of the bytes queued on a stream. A higher limit would delay expedited loads.
#: With a lower limit, the link would become idle if a busy interpreter delayed a piece by 5 ms.
WINDOW_BYTES = 256 * 1024**2
#: Approximate limit of the runs queued on a stream. With 131,072 queued runs, a driver blocked the
#: caller until the stream had copied them. The threshold is unknown, so this limit is far lower.
WINDOW_RUNS = 1024
#: Copies are queued in pieces of at most this size.
PIECE_BYTES = 64 * 1024**2
#: Priorities of the streams for stores, loads and expedited loads.
_PRIORITIES = (0, -1, -1)
#: Pause before a failed query is repeated.
_PAUSE_S = 0.001

_Piece: TypeAlias = CopyPlan | StagedPiece


class CUDADevice(Device):
    """A device for one accelerator, with a separate stream for each kind of job."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.driver = CUDADriver(device)
        with torch.cuda.device(device):
            self._lanes = [_Lane(self, priority) for priority in _PRIORITIES]
        self._registration: Registration | None = None
        self._gatherer: Gatherer | None = None

    def register(self, host: HostLayout, groups: Sequence[GroupLayout]) -> None:
        with self.current():
            try:
                self._registration = Registration(host, self.driver)
            except RefusedError as refused:
                _log.warning("%s; copies wait for each other and for the engine", refused)
            if not Gatherer.is_wanted(groups):
                return
            try:
                self._gatherer = Gatherer(PageKernel(self.device), groups, _PRIORITIES)
            except Exception as raised:  # errors of torch and triton have no common base class
                _log.warning(
                    "pages of less than 128 KiB are copied one by one, which is slower: %s",
                    _first_line(raised),
                )

    def start(self, plan: JobPlan, after: StreamOrEvent | None) -> Copy:
        if after is None:
            raise ValueError(
                "a job on an accelerator needs 'after': the stream that computes on its blocks, or "
                "an event recorded there"
            )
        operation = plan.operation
        number = 0 if operation is Operation.STORE else 2 if plan.expedited else 1
        lane = self._lanes[number]
        with self.driver.during_captures():
            # Record an event now, so that the copy waits only for work queued before this call.
            event = after.record_event() if isinstance(after, torch.Stream) else after
            with self.current():
                copy = _StreamCopy(self, lane.copies, self._pieces(plan, number), operation, event)
                lane.add(copy)
        return copy

    def _pieces(self, plan: JobPlan, lane: int) -> list[_Piece]:
        if self._gatherer is not None and self._gatherer.suits(plan):
            return [*self._gatherer.pieces(plan, lane)]
        parts = plan.runs().split(-(-plan.size_bytes // PIECE_BYTES))
        return [piece for part in parts for piece in part.in_pieces(PIECE_RUNS)]

    def close(self) -> None:
        self._gatherer = None
        if self._registration is not None:
            with self.current():
                self._registration.release()
            self._registration = None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device current in this thread, for torch and for the driver."""
        with torch.cuda.device(self.device), self.driver.current():
            yield

    def enqueue(self, plan: CopyPlan, operation: Operation, stream: torch.cuda.Stream) -> None:
        enqueue = self.driver.copy_each
        if self._registration is not None:
            plan = self._registration.fit(plan)
            enqueue = self.driver.copy_batch
        store = operation is Operation.STORE
        ends = (plan.host, plan.device) if store else (plan.device, plan.host)
        # The driver may read slots immediately, because they do not change during a load. It must
        # read a store's blocks in stream order, because the engine may still be computing them.
        order = ORDER_STREAM if store else ORDER_ANY
        enqueue(*ends, plan.lengths_bytes, order, stream.cuda_stream)

    def is_lost(self) -> bool:
        """Return true if the device's context has failed, which ends all queued copies."""
        try:
            torch.cuda.mem_get_info(self.device)
        except RuntimeError:
            return True
        return False


class _Lane:
    """The stream for one kind of job, and the copies that still have pieces to queue."""

    def __init__(self, device: CUDADevice, priority: int) -> None:
        self.copies = torch.cuda.Stream(device.device, priority=priority)
        self._device = device
        self._lock = threading.Lock()
        self._waiting: deque[_StreamCopy] = deque()
        self._in_flight: deque[_Mark] = deque()
        self._feeding = False

    def add(self, copy: _StreamCopy) -> None:
        with self._lock:
            self._waiting.append(copy)
            self._queue()
            if self._waiting and not self._feeding:
                self._feeding = True
                threading.Thread(target=self._feed, name="kvtier-copies", daemon=True).start()

    def _queue(self) -> None:
        """Queue the pieces that fit in the window. The caller must hold the lock."""
        while self._in_flight and self._in_flight[0].is_reached():
            self._in_flight.popleft()
        room_bytes = WINDOW_BYTES - sum(mark.size_bytes for mark in self._in_flight)
        room_runs = WINDOW_RUNS - sum(mark.runs for mark in self._in_flight)
        while self._waiting and room_bytes > 0 and room_runs > 0:
            copy = self._waiting[0]
            mark = copy.queue_piece()
            self._in_flight.append(mark)
            room_bytes -= mark.size_bytes
            room_runs -= mark.runs
            if copy.all_queued.is_set():
                self._waiting.popleft()

    def _feed(self) -> None:
        with self._device.current():
            while True:
                with self._lock, self._device.driver.during_captures():
                    self._queue()
                    if not self._waiting:
                        self._feeding = False
                        return
                    oldest = self._in_flight[0]
                oldest.wait()


class _Mark:
    """An event that a stream records after a piece; ``error`` is set if the context is lost."""

    def __init__(self, device: CUDADevice, piece: _Piece) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.error: str | None = None
        self.size_bytes, self.runs = piece.size_bytes, piece.runs
        self._device = device

    def is_reached(self) -> bool:
        """Return true if all work before the mark has ended or will never run. Never blocks."""
        with self._device.driver.during_captures():
            try:
                return bool(self.event.query())
            except RuntimeError as raised:
                # The query failed, but the context is intact, so the copy may still be running.
                if not self._device.is_lost():
                    return False
                self.error = _first_line(raised)
                return True

    def wait(self) -> None:
        """Block until the mark is reached, without holding the interpreter lock."""
        pause = threading.Event()
        while not self.is_reached():
            try:
                with self._device.driver.during_captures():
                    self.event.synchronize()
            except RuntimeError:
                pause.wait(_PAUSE_S)


@dataclass(eq=False)
class _StreamCopy(Copy):
    _device: CUDADevice
    _copies: torch.cuda.Stream
    _pieces: list[_Piece]
    _operation: Operation
    _after: torch.Event
    all_queued: threading.Event = field(default_factory=threading.Event)
    _began: torch.cuda.Event | None = None
    _ended: _Mark = field(init=False)  # the latest piece's mark, set before ``all_queued``
    _error: str | None = None

    def __post_init__(self) -> None:
        self._first = self._last = self._copies
        if isinstance(self._pieces[0], StagedPiece):
            self._first, self._last = self._pieces[0].ends(self._operation, self._copies)
        self._pieces.reverse()

    def queue_piece(self) -> _Mark:
        """Queue a piece, and return its mark. A failure drops the remaining pieces."""
        piece = self._pieces.pop()
        mark = _Mark(self._device, piece)
        try:
            if self._began is None:
                self._first.wait_event(self._after)
                self._began = torch.cuda.Event(enable_timing=True)
                self._began.record(self._first)
            if isinstance(piece, StagedPiece):
                piece.queue(self._operation, self._copies, self._device.enqueue)
            else:
                self._device.enqueue(piece, self._operation, self._copies)
        except (KVTierError, RuntimeError) as raised:
            # Some runs may already be queued. The copy is done only after they have ended.
            self._error = _first_line(raised)
            self._pieces.clear()
        try:
            mark.event.record(self._last)
        except RuntimeError as raised:
            self._error = self._error or _first_line(raised)
            self._pieces.clear()
        self._ended = mark
        if not self._pieces:
            self.all_queued.set()
        return mark

    def done(self) -> bool:
        return self.all_queued.is_set() and self._ended.is_reached()

    def wait(self) -> None:
        self.all_queued.wait()
        self._ended.wait()

    def outcome(self) -> tuple[str | None, float]:
        error = self._error or self._ended.error
        if self._began is None:
            return error, 0.0
        try:
            with self._device.driver.during_captures():
                return error, float(self._began.elapsed_time(self._ended.event)) / 1000
        except RuntimeError:
            # The duration is unknown, because the context is lost or an event was never recorded.
            return error, 0.0


def _first_line(raised: Exception) -> str:
    return str(raised).partition("\n")[0]
