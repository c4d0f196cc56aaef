"""The device, and functions of CUDA that torch does not offer.

Names and numbers come from ``cuda.h``, ``driver_types.h`` and ``cuda_runtime_api.h``, and are the
same in CUDA 12.9 and 13.0.
"""

from __future__ import annotations

import ctypes
import functools

import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: The clock rate of an H200. A device with a slower clock sleeps longer.
_CYCLES_PER_S = 2_000_000_000

CAPTURE_MODES = {"relaxed": 2, "thread local": 1, "global": 0}


@functools.cache
def has_device() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    if has_device():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def computing() -> torch.cuda.Stream | None:
    return torch.cuda.current_stream() if has_device() else None


def sleep_on_stream(seconds: float) -> None:
    if has_device():
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))


def synchronize() -> None:
    if has_device():
        torch.cuda.synchronize()


class Runtime:
    def __init__(self) -> None:
        library = ctypes.CDLL(torch._C.__file__)
        self._take = library.cudaGetLastError
        self._name = library.cudaGetErrorName
        self._name.restype = ctypes.c_char_p
        self._begin_capture = library.cudaStreamBeginCapture
        self._begin_capture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        self._end_capture = library.cudaStreamEndCapture
        self._end_capture.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)]
        self._destroy_graph = library.cudaGraphDestroy
        self._destroy_graph.argtypes = [ctypes.c_void_p]

    def describe(self, status: int) -> str:
        return f"{status} ({self._name(status).decode()})"

    def begin_capture(self, stream: torch.cuda.Stream, mode: int) -> int:
        return int(self._begin_capture(stream.cuda_stream, mode))

    def end_capture(self, stream: torch.cuda.Stream) -> int:
        graph = ctypes.c_void_p()
        status = int(self._end_capture(stream.cuda_stream, ctypes.byref(graph)))
        if graph.value is not None:
            self._destroy_graph(graph)
        # Clear the last error, because torch checks it after each kernel.
        self._take()
        return status
