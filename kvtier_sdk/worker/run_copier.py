"""Copies of many pieces of host memory in one call, without the interpreter lock.

One call for each piece would take the lock again after each. Beside an engine that computes in
Python, each time costs milliseconds, and there are thousands of pieces. So numba compiles the loop
when the worker is made. If numba is not installed, the kernel runs the loop (``process_vm_readv``
on the process itself), at roughly half the speed for small pieces.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.worker.planning import Int64s

#: ``copy(destinations, sources, lengths_bytes)``; raises if not all was copied.
RunCopier: TypeAlias = Callable[[Int64s, Int64s, Int64s], None]

#: The most pieces that the kernel accepts in one call.
_IOV_MAX = 1024

_log = logging.getLogger("kvtier.worker")


@functools.cache
def run_copier() -> RunCopier:
    """Return the fastest copier that works here.

    Raises:
        ConfigError: none works.
    """
    try:
        return compiled_copier()
    except ImportError:
        return kernel_copier()
    except Exception as error:
        # With an llvmlite of the wrong version, numba imports but fails to compile.
        _log.warning("numba failed to compile, so copies are slower: %s", error)
        return kernel_copier()


def compiled_copier() -> RunCopier:
    """Return a loop that numba compiles for this processor: about a second, once.

    It is written byte by byte and compiles to a loop over vector registers. Scattered pages of
    16 KiB were copied a sixth faster than by the C library's ``memcpy``, which uses string
    instructions at that size.

    Raises:
        ImportError: numba is not installed.
    """
    import numba
    from numba.core import cgutils
    from numba.extending import intrinsic

    def as_pointer(_context: Any, _address: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            return builder.inttoptr(values[0], cgutils.voidptr_t)

        return numba.types.voidptr(numba.types.int64), generate

    pointer = intrinsic(as_pointer)
    array = numba.carray
    byte = np.uint8

    def copy(destinations: Int64s, sources: Int64s, lengths_bytes: Int64s) -> None:
        for run in range(len(lengths_bytes)):
            length_bytes = lengths_bytes[run]
            into = array(pointer(destinations[run]), length_bytes, byte)
            out_of = array(pointer(sources[run]), length_bytes, byte)
            for index in range(length_bytes):
                into[index] = out_of[index]

    signature = "void(int64[::1], int64[::1], int64[::1])"
    compiled: RunCopier = numba.njit(signature, nogil=True)(copy)
    return compiled


def kernel_copier() -> RunCopier:
    """Return a copier that calls ``process_vm_readv`` from this process into itself.

    Raises:
        ConfigError: the kernel refuses the call.
    """
    read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    read.restype = ctypes.c_ssize_t
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    read.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]

    def copy(destinations: Int64s, sources: Int64s, lengths_bytes: Int64s) -> None:
        process = os.getpid()
        into = np.stack((destinations, lengths_bytes), axis=1)
        out_of = np.stack((sources, lengths_bytes), axis=1)
        for begin in range(0, len(lengths_bytes), _IOV_MAX):
            some_into, some_out_of = into[begin:][:_IOV_MAX], out_of[begin:][:_IOV_MAX]
            count = len(some_into)
            moved_bytes = read(
                process, some_into.ctypes.data, count, some_out_of.ctypes.data, count, 0
            )
            if moved_bytes < 0:
                number = ctypes.get_errno()
                raise OSError(number, f"process_vm_readv: {os.strerror(number)}")
            if moved_bytes != some_into[:, 1].sum():
                raise OSError(f"process_vm_readv stopped after {moved_bytes} bytes")

    probe = np.arange(2, dtype=np.int64)
    one = np.array([probe.itemsize], np.int64)
    try:
        copy(np.array([probe.ctypes.data]), np.array([probe.ctypes.data + probe.itemsize]), one)
    except OSError as error:
        raise ConfigError(
            f"cannot copy outside the interpreter lock ({error}): pip install numba"
        ) from error
    return copy
