"""CUDA and ROCm tensors: copies on separate streams, many runs in one call of the driver.

The driver is called through ctypes, because torch has no batched copy, and a tensor for each run
would cost more than the run. A queued copy consists of addresses alone; CUDA and HIP accept them
for host and device memory alike.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from itertools import pairwise

import torch

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker.device import Copy, Device
from kvtier_sdk.worker.planning import CopyPlan, HostLayout, Int64s

_log = logging.getLogger("kvtier.worker")

#: Drivers refuse much larger registrations.
MAX_REGISTER_BYTES = 64 * 1024**3
#: Valid in every context, not only in the registering one.
_HOST_REGISTER_PORTABLE = 1
#: The time at which a copy may read its sources: in stream order, or any time after the call.
_ORDER_STREAM, _ORDER_ANY = 1, 3
#: The driver derives the direction from the addresses.
_HIP_MEMCPY_DEFAULT = 4


class CUDADevice(Device):
    """One accelerator.

    Stores have one stream, loads one of higher priority, and expedited loads another, so that none
    queues behind the others. Each copy begins after the work that was queued on the engine's stream
    when it was started. For a store, that work writes the blocks; for a load, it may still read or
    clear them.

    Args:
        device: the device of the tensors.

    Raises:
        ConfigError: the driver cannot be loaded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._driver = _HIPDriver() if torch.version.hip else _CUDADriver()
        with torch.cuda.device(device):
            self._stores = torch.cuda.Stream(device, priority=0)
            self._loads = torch.cuda.Stream(device, priority=-1)
            self._expedited = torch.cuda.Stream(device, priority=-1)
        self._registered: list[int] = []
        self._pinned = False

    def register(self, host: HostLayout) -> None:
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):
            for begin, end in pairwise(_cuts(host)):
                size_bytes = end - begin
                status = int(runtime.cudaHostRegister(begin, size_bytes, _HOST_REGISTER_PORTABLE))
                if status:
                    _forget_error()
                    self._unregister()
                    _log.warning(
                        "the driver did not register %s of host memory (error %d), so copies wait "
                        "for each other and for the engine; check `ulimit -l`",
                        format_bytes(size_bytes),
                        status,
                    )
                    return
                self._registered.append(begin)
        self._pinned = True

    def start(self, plan: CopyPlan, operation: Operation, *, expedited: bool) -> Copy:
        store = operation is Operation.STORE
        stream = self._stores if store else self._expedited if expedited else self._loads
        ends = (plan.host, plan.device) if store else (plan.device, plan.host)
        # A slot does not change during a load; a block changes until the stream reaches the store.
        order = _ORDER_STREAM if store else _ORDER_ANY
        enqueue = self._driver.copy_batch if self._pinned else self._driver.copy_each
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        error: str | None = None
        with torch.cuda.device(self._device):
            stream.wait_stream(torch.cuda.current_stream(self._device))
            began.record(stream)
            try:
                enqueue(*ends, plan.lengths_bytes, order, stream.cuda_stream)
            except KVTierError as raised:
                # Some runs may be queued: the copy is done when they have ended.
                error = str(raised)
            ended.record(stream)
        return _StreamCopy(plan, began, ended, error)

    def close(self) -> None:
        with torch.cuda.device(self._device):
            self._unregister()

    def _unregister(self) -> None:
        while self._registered:
            if int(torch.cuda.cudart().cudaHostUnregister(self._registered.pop())):
                _forget_error()
        self._pinned = False


class _StreamCopy(Copy):
    def __init__(
        self, plan: CopyPlan, began: torch.cuda.Event, ended: torch.cuda.Event, error: str | None
    ) -> None:
        self._plan = plan  # keeps the arrays alive that the driver reads
        self._began = began
        self._ended = ended
        self._error = error

    def done(self) -> bool:
        return self._ask(self._ended.query) is not False

    def wait(self) -> None:
        self._ask(self._ended.synchronize)

    def error(self) -> str | None:
        return self._error

    def duration_s(self) -> float:
        milliseconds = self._ask(lambda: self._began.elapsed_time(self._ended))
        return 0.0 if milliseconds is None else milliseconds / 1000

    def _ask(self, question: Callable[[], float | None]) -> float | None:
        try:
            return question()
        except RuntimeError as raised:
            # The context is lost with all queued work, so nothing is running.
            self._error = self._error or str(raised).partition("\n")[0]
            return None


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``; a location of type 0 gives no hint."""

    _fields_ = (
        ("order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("destination_type", ctypes.c_int),
        ("destination_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


class _CUDADriver:
    """``cuMemcpyBatchAsync`` from CUDA 12.8 on; before that, one ``cuMemcpyAsync`` for each run."""

    def __init__(self) -> None:
        library = _load_library("libcuda.so.1")
        pointer, size_t = ctypes.c_void_p, ctypes.c_size_t
        self._copy_one = library.cuMemcpyAsync
        self._copy_one.argtypes = [pointer, pointer, size_t, pointer]
        # The first version has one more argument, which receives the run that it refused.
        self._says_which = not hasattr(library, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._says_which else "cuMemcpyBatchAsync_v2"
        self._batch = getattr(library, name, None)
        if self._batch is not None:
            runs = [pointer, pointer, pointer, size_t]
            attributes = [pointer, pointer, size_t]
            self._batch.argtypes = [*runs, *attributes, *[pointer] * (1 + self._says_which)]

    def copy_batch(
        self, into: Int64s, out_of: Int64s, lengths_bytes: Int64s, order: int, stream: int
    ) -> None:
        """Queue all runs in one call. Both ends must be device memory or registered memory."""
        if self._batch is None:
            self.copy_each(into, out_of, lengths_bytes, order, stream)
            return
        attributes = _Attributes(order=order)
        first_run = ctypes.c_size_t(0)
        refused = [ctypes.byref(ctypes.c_size_t(0))] if self._says_which else []
        status = self._batch(
            *(array.ctypes.data for array in (into, out_of, lengths_bytes)),
            len(lengths_bytes),
            ctypes.byref(attributes),
            ctypes.byref(first_run),
            1,
            *refused,
            stream,
        )
        _check("cuMemcpyBatchAsync", status)

    def copy_each(
        self, into: Int64s, out_of: Int64s, lengths_bytes: Int64s, order: int, stream: int
    ) -> None:
        """Queue the runs one by one."""
        for run in zip(into.tolist(), out_of.tolist(), lengths_bytes.tolist(), strict=True):
            _check("cuMemcpyAsync", self._copy_one(*run, stream))


class _HIPDriver:
    """``hipMemcpyAsync`` for each run: HIP's batch call is too new for the versions in use."""

    def __init__(self) -> None:
        self._copy_one = _load_library("libamdhip64.so").hipMemcpyAsync
        pointer, size_t = ctypes.c_void_p, ctypes.c_size_t
        self._copy_one.argtypes = [pointer, pointer, size_t, ctypes.c_int, pointer]

    def copy_each(
        self, into: Int64s, out_of: Int64s, lengths_bytes: Int64s, order: int, stream: int
    ) -> None:
        """Queue the runs one by one."""
        for run in zip(into.tolist(), out_of.tolist(), lengths_bytes.tolist(), strict=True):
            _check("hipMemcpyAsync", self._copy_one(*run, _HIP_MEMCPY_DEFAULT, stream))

    copy_batch = copy_each


def _cuts(host: HostLayout) -> list[int]:
    """Return the addresses at which the memory is cut into pieces that can be registered.

    The first address is where the slots begin, the last where they end. A page may be registered
    only once, and a worker's part of a slot may begin inside a page: pieces meet at its beginning.
    """
    end = host.address + (host.slots - 1) * host.row_bytes + host.part_bytes
    piece_bytes = max(1, MAX_REGISTER_BYTES // host.row_bytes) * host.row_bytes
    between = range(host.address + piece_bytes, end, piece_bytes)
    return [host.address, *(at - at % mmap.PAGESIZE for at in between), end]


def _forget_error() -> None:
    """Clear the error that a refused call left behind in this thread.

    The runtime reports it to the next caller that checks for errors: the engine, after a kernel of
    its own. torch has no function to clear it, but the runtime can be reached through torch's
    library, which is linked with it.
    """
    name = "hipGetLastError" if torch.version.hip else "cudaGetLastError"
    last_error = getattr(ctypes.CDLL(torch._C.__file__), name, None)
    # A torch with a built-in runtime may not export the function.
    if last_error is not None:
        last_error()


def _load_library(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise ConfigError(f"the driver of the accelerator cannot be loaded: {error}") from error


def _check(call: str, status: int) -> None:
    if status:
        raise KVTierError(f"{call}: error {status}")
