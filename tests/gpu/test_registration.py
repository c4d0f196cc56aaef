"""The time that the driver takes to register a pool's memory."""

from __future__ import annotations

import time

import torch
from support.gpu.accelerator import GIB, KIB, MIB, Runtime, device, has_device
from support.gpu.figures import Figure
from support.gpu.memory import pools

from kvtier_sdk.worker.driver import forget_error

#: The flag ``cudaHostRegisterPortable``, which the worker passes.
_PORTABLE = 1
#: The length of a row in a pool, and the number of ranks that share a row.
_ROW_BYTES, _RANKS = 4 * MIB, 8


def test_registration(figure: Figure) -> None:
    for kind, pool in pools(GIB if has_device() else 32 * MIB):
        size_bytes = pool.layout.size_bytes
        figure(f"{kind}: size", size_bytes / GIB, "GiB")
        if has_device():
            _register(figure, kind, pool.part(0).ctypes.data, size_bytes)
            _register_parts(figure, kind, pool.part(0).ctypes.data, size_bytes)


def _register_parts(figure: Figure, kind: str, address: int, size_bytes: int) -> None:
    calls = torch.cuda.cudart()
    begins = range(address, address + size_bytes, _ROW_BYTES)
    began_s = time.perf_counter()
    refused = sum(
        bool(int(calls.cudaHostRegister(begin, _ROW_BYTES // _RANKS, _PORTABLE)))
        for begin in begins
    )
    took_s = time.perf_counter() - began_s
    name = f"{kind}: {len(begins)} parts of {_ROW_BYTES // _RANKS // KIB} KiB"
    assert not refused, f"{name}: {refused} refused"
    figure(f"{name}: registered in", took_s / size_bytes * 1e9, "s/GB of the pool")
    for begin in begins:
        calls.cudaHostUnregister(begin)


def _register(figure: Figure, kind: str, address: int, size_bytes: int) -> None:
    # Create the device's context now, so that the measured time does not include it.
    torch.zeros(1, device=device())
    runtime, calls = Runtime(), torch.cuda.cudart()
    began_s = time.perf_counter()
    status = int(calls.cudaHostRegister(address, size_bytes, _PORTABLE))
    took_s = time.perf_counter() - began_s
    figure(f"{kind}: status", runtime.describe(status))
    assert not status, f"the driver does not register {kind} memory"
    figure(f"{kind}: registered in", took_s / size_bytes * 1e9, "s/GB")
    # Record how the driver refuses to register the same memory again.
    refusal = int(calls.cudaHostRegister(address, size_bytes, _PORTABLE))
    figure(f"{kind}: status of the second time", runtime.describe(refusal))
    figure(f"{kind}: last error after that", runtime.last_error())
    forget_error()
    left = runtime.last_error()
    assert left.startswith("0 "), f"the worker does not take back the last error: {left}"
    began_s = time.perf_counter()
    status = int(calls.cudaHostUnregister(address))
    took_s = time.perf_counter() - began_s
    assert not status, f"{kind}: unregistered with status {runtime.describe(status)}"
    figure(f"{kind}: unregistered in", took_s / size_bytes * 1e9, "s/GB")
