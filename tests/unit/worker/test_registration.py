"""Registration of host memory with CUDA and HIP, against a runtime that keeps their rules."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kvtier_sdk import PoolLayout
from kvtier_sdk.worker import cuda as cuda_module
from kvtier_sdk.worker.cuda import CUDADevice
from kvtier_sdk.worker.planning import HostLayout

PAGE_BYTES = mmap.PAGESIZE
ADDRESS = 1 << 40
REFUSED, REGISTERED_ALREADY, NOT_REGISTERED = 1, 712, 713


class Runtime:
    """A runtime that registers a page once, and keeps an error until it is asked for it.

    Attributes:
        pieces: size of each registered piece, by address.
        error: the error that the engine's next kernel would see.
        limit_bytes: the most memory that may be registered (``ulimit -l``).
    """

    def __init__(self, limit_bytes: int = 1 << 60) -> None:
        self.pieces: dict[int, int] = {}
        self.error = 0
        self.limit_bytes = limit_bytes

    def pages(self) -> set[int]:
        """Return the registered pages."""
        return {page for piece in self.pieces.items() for page in _pages(*piece)}

    def register(self, address: int, size_bytes: int, flags: int) -> int:
        pages = _pages(address, size_bytes)
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

    def _fail(self, error: int) -> int:
        self.error = error
        return error


def _pages(address: int, size_bytes: int) -> range:
    return range(address // PAGE_BYTES, -(-(address + size_bytes) // PAGE_BYTES))


@pytest.fixture(params=["cuda", "hip"])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime in the place of the libraries; torch offers only two of its calls."""
    runtime = Runtime()
    monkeypatch.setattr(torch.version, "hip", "7.0" if request.param == "hip" else None)
    libraries = {
        "libcuda.so.1": SimpleNamespace(cuMemcpyAsync=SimpleNamespace()),
        "libamdhip64.so": SimpleNamespace(hipMemcpyAsync=SimpleNamespace()),
        torch._C.__file__: SimpleNamespace(**{f"{request.param}GetLastError": runtime.last_error}),
    }
    monkeypatch.setattr(ctypes, "CDLL", libraries.__getitem__)
    passed_on = SimpleNamespace(
        cudaHostRegister=runtime.register, cudaHostUnregister=runtime.unregister
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: passed_on)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    yield runtime
    assert runtime.error == 0, "the engine is told of an error that is not its own"


def host(slots: int, part_bytes: int, *, workers: int = 1, worker: int = 0) -> HostLayout:
    layout = PoolLayout(slots, part_bytes, workers)
    address = ADDRESS + layout.part_offset(worker)
    return HostLayout(slots, address, layout.row_bytes, part_bytes)


def slot_pages(host: HostLayout) -> set[int]:
    """Return the pages that must be registered for slots to be copied in one piece."""
    begins = range(host.address, host.address + host.slots * host.row_bytes, host.row_bytes)
    return {page for begin in begins for page in _pages(begin, host.part_bytes)}


@pytest.mark.parametrize("limit_bytes", [0, 10 * PAGE_BYTES])
def test_a_refusal_is_warned_of_and_not_left_for_the_engine(
    runtime: Runtime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit_bytes: int,
) -> None:
    monkeypatch.setattr(cuda_module, "MAX_REGISTER_BYTES", 8 * PAGE_BYTES)
    runtime.limit_bytes = limit_bytes
    CUDADevice(torch.device("cuda")).register(host(100, PAGE_BYTES))
    assert runtime.pieces == {}
    assert "did not register 32 KiB of host memory (error 1)" in caplog.text


def test_memory_that_is_not_registered_any_more_is_no_error_of_the_engines(
    runtime: Runtime,
) -> None:
    device = CUDADevice(torch.device("cuda"))
    device.register(host(4, PAGE_BYTES))
    runtime.pieces.clear()
    device.close()


@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("part_bytes", [PAGE_BYTES, 5000, 100, 3 * PAGE_BYTES + 64])
def test_pieces_of_a_large_pool_share_no_page_and_cut_no_slot(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, part_bytes: int, worker: int
) -> None:
    monkeypatch.setattr(cuda_module, "MAX_REGISTER_BYTES", 64 * PAGE_BYTES)
    part = host(100, part_bytes, workers=3, worker=worker)
    device = CUDADevice(torch.device("cuda"))
    device.register(part)
    assert len(runtime.pieces) > 1
    assert slot_pages(part) <= runtime.pages()
    for at in range(part.address, part.address + part.slots * part.row_bytes, part.row_bytes):
        assert any(
            begin <= at and at + part_bytes <= begin + size_bytes
            for begin, size_bytes in runtime.pieces.items()
        )
    device.close()
    assert runtime.pieces == {}


@pytest.mark.parametrize("row_bytes", [1000, 5000, 70_000])
def test_rows_that_begin_inside_pages_are_registered_too(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, row_bytes: int
) -> None:
    monkeypatch.setattr(cuda_module, "MAX_REGISTER_BYTES", 64 * PAGE_BYTES)
    part = HostLayout(1000, ADDRESS + 32, row_bytes, row_bytes - 64)
    CUDADevice(torch.device("cuda")).register(part)
    assert len(runtime.pieces) > 1
    assert slot_pages(part) <= runtime.pages()
