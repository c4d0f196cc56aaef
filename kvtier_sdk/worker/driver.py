"""CUDA calls that torch does not expose, made through ctypes.

torch has no batched copy, and making a tensor for each contiguous run would take longer than the
copy. CUDA's own calls copy between plain addresses of host or device memory.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

import torch

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.worker.planning import Int64s

#: ``CUmemcpySrcAccessOrder``: a copy reads its sources in stream order, or at any time.
ORDER_STREAM, ORDER_ANY = 1, 3
#: In this mode a thread may make any call while another thread captures a graph.
_CAPTURE_RELAXED = 2

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t


class CUDADriver:
    """The CUDA driver; it acts on the thread's current device. Batches need CUDA 12.8."""

    def __init__(self, device: torch.device) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise ConfigError(f"CUDA's driver cannot be loaded: {error}") from error
        self._context = ctypes.c_void_p()
        # Never release the context, because torch uses it until the process ends.
        if status := library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device.index):
            raise ConfigError(f"{device} has no context: error {status}")
        self._push, self._pop = library.cuCtxPushCurrent_v2, library.cuCtxPopCurrent_v2
        self._copy_one = library.cuMemcpyAsync
        self._copy_one.argtypes = [_POINTER, _POINTER, _SIZE, _POINTER]
        self._exchange_capture_mode = library.cuThreadExchangeStreamCaptureMode
        self._host_get_device_pointer = library.cuMemHostGetDevicePointer_v2
        self._host_get_device_pointer.argtypes = [_POINTER, _POINTER, ctypes.c_uint]
        # The first version of the batch call has an extra argument, for the index of a refused run.
        self._says_which = not hasattr(library, "cuMemcpyBatchAsync_v2")
        name = "cuMemcpyBatchAsync" if self._says_which else "cuMemcpyBatchAsync_v2"
        self._batch = getattr(library, name, None)
        if self._batch is not None:
            runs = [_POINTER, _POINTER, _POINTER, _SIZE]
            attributes = [_POINTER, _POINTER, _SIZE]
            self._batch.argtypes = [*runs, *attributes, *[_POINTER] * (1 + self._says_which)]

    def copy_each(
        self, into: Int64s, out_of: Int64s, lengths_bytes: Int64s, order: int, stream: int
    ) -> None:
        copy = self._copy_one
        for run in zip(into.tolist(), out_of.tolist(), lengths_bytes.tolist(), strict=True):
            if status := copy(*run, stream):
                raise KVTierError(f"{copy.__name__}: error {status}")

    def device_address(self, host_address: int) -> int | None:
        """Return the device's address of registered host memory, or ``None`` for other memory."""
        found = ctypes.c_void_p(0)
        if self._host_get_device_pointer(ctypes.byref(found), host_address, 0):
            forget_error()
            return None
        return found.value

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in this thread."""
        # Push the context, because a new thread has none, and an engine's thread may use another
        # device's. The push may fail if the context is lost; calls in the ``with`` block report it.
        is_pushed = not self._push(self._context)
        try:
            yield
        finally:
            if is_pushed:
                self._pop(ctypes.byref(ctypes.c_void_p()))

    @contextlib.contextmanager
    def during_captures(self) -> Iterator[None]:
        """Allow calls in this thread that a graph's capture forbids, such as a query."""
        # Outside the ``with`` block, such a call would fail while any thread captures a graph, and
        # invalidate the capture. Code inside must not use a stream that is being captured.
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._exchange_capture_mode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange_capture_mode(ctypes.byref(mode))

    def copy_batch(
        self, into: Int64s, out_of: Int64s, lengths_bytes: Int64s, order: int, stream: int
    ) -> None:
        """Queue all runs, in one call if possible. Host memory must be registered."""
        if self._batch is None:
            self.copy_each(into, out_of, lengths_bytes, order, stream)
            return
        # The struct ``CUmemcpyAttributes``: the order, then zeros, which specify no locations.
        attributes = (ctypes.c_int * 6)(order)
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
        if status:
            raise KVTierError(f"{self._batch.__name__}: error {status}")


def forget_error() -> None:
    """Clear the error that a refused call has left in this thread."""
    # Clear it, because the runtime would attribute the error to one of the engine's kernels.
    last_error = getattr(ctypes.CDLL(torch._C.__file__), "cudaGetLastError", None)
    # A build of torch that contains the runtime may not export the function.
    if last_error is not None:
        last_error()
