"""Host memory is registered with a fake runtime that enforces CUDA's rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.fake_cuda import PAGE_BYTES, FakeCUDA, pages_of
from support.gpu.memory import mapped

from kvtier_sdk import PoolLayout
from kvtier_sdk.worker import registration as registration_module
from kvtier_sdk.worker.cuda import CUDADevice
from kvtier_sdk.worker.geometry import host_layout
from kvtier_sdk.worker.planning import HostLayout

ADDRESS = 1 << 40


def host(slots: int, part_bytes: int, *, workers: int = 1, worker: int = 0) -> HostLayout:
    layout = PoolLayout(slots, part_bytes, workers)
    address = ADDRESS + layout.part_offset(worker)
    return HostLayout(slots, address, layout.row_bytes, part_bytes)


def slot_pages(host: HostLayout) -> set[int]:
    begins = range(host.address, host.address + host.slots * host.row_bytes, host.row_bytes)
    return {page for begin in begins for page in pages_of(begin, host.part_bytes)}


@pytest.mark.parametrize("limit_bytes", [0, 10 * PAGE_BYTES])
def test_a_refusal_is_warned_of_and_not_left_for_the_engine(
    runtime: FakeCUDA,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    limit_bytes: int,
) -> None:
    monkeypatch.setattr(registration_module, "MAX_REGISTER_BYTES", 8 * PAGE_BYTES)
    runtime.limit_bytes = limit_bytes
    CUDADevice(torch.device("cuda:0")).register(host(100, PAGE_BYTES), ())
    assert runtime.pieces == {}
    assert "did not register 32 KiB of host memory (error 1): check `ulimit -l`" in caplog.text


def test_unregistering_lost_memory_leaves_no_error(runtime: FakeCUDA) -> None:
    device = CUDADevice(torch.device("cuda:0"))
    device.register(host(4, PAGE_BYTES), ())
    runtime.pieces.clear()
    device.close()


@pytest.mark.parametrize("worker", range(3))
@pytest.mark.parametrize("part_bytes", [PAGE_BYTES, 5000, 100, 3 * PAGE_BYTES + 64])
def test_pieces_of_a_large_pool_share_no_page_and_cut_no_slot(
    runtime: FakeCUDA, monkeypatch: pytest.MonkeyPatch, part_bytes: int, worker: int
) -> None:
    monkeypatch.setattr(registration_module, "MAX_REGISTER_BYTES", 64 * PAGE_BYTES)
    part = host(100, part_bytes, workers=3, worker=worker)
    device = CUDADevice(torch.device("cuda:0"))
    device.register(part, ())
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
    runtime: FakeCUDA, monkeypatch: pytest.MonkeyPatch, row_bytes: int
) -> None:
    monkeypatch.setattr(registration_module, "MAX_REGISTER_BYTES", 64 * PAGE_BYTES)
    part = HostLayout(1000, ADDRESS + 32, row_bytes, row_bytes - 64)
    CUDADevice(torch.device("cuda:0")).register(part, ())
    assert len(runtime.pieces) > 1
    assert slot_pages(part) <= runtime.pages()


def open_device(host: HostLayout) -> CUDADevice:
    device = CUDADevice(torch.device("cuda:0"))
    device.register(host, ())
    return device


def test_parts_may_overlap(runtime: FakeCUDA, caplog: pytest.LogCaptureFixture) -> None:
    parts = [host(4, 3000, workers=5, worker=worker) for worker in range(5)]
    devices = [open_device(part) for part in parts]
    assert caplog.text == ""
    for part, device in zip(parts, devices, strict=True):
        assert slot_pages(part) <= runtime.pages()
        device.close()
    assert runtime.pieces == {}


def test_pinned_memory_may_begin_inside_a_page(
    runtime: FakeCUDA, caplog: pytest.LogCaptureFixture
) -> None:
    part = host(4, PAGE_BYTES)
    layout = replace(part, address=part.address + 512, has_own_pages=False)
    runtime.pinned[layout.address] = 4 * PAGE_BYTES
    open_device(layout).close()
    assert caplog.text == ""
    assert runtime.pieces == {}


def test_no_page_with_memory_of_others_is_registered(
    runtime: FakeCUDA, caplog: pytest.LogCaptureFixture
) -> None:
    """If such a page were registered, the driver would refuse copies of the others' memory."""
    whole = mapped(6, PAGE_BYTES).reshape(-1)
    of_an_allocator = np.frombuffer(whole.data[512 : 512 + 4 * PAGE_BYTES], np.uint8)
    for memory in (of_an_allocator, torch.frombuffer(of_an_allocator, dtype=torch.uint8)):
        open_device(host_layout(memory.reshape(4, PAGE_BYTES)))
        assert runtime.pieces == {}
        assert "20 KiB of host memory cannot be registered" in caplog.text
        assert "use a HostPool, a mapping or pinned memory" in caplog.text
        caplog.clear()
    for memory in (whole[512:], torch.from_numpy(whole)[512:]):
        device = open_device(host_layout(memory[: 4 * PAGE_BYTES].reshape(4, PAGE_BYTES)))
        assert runtime.pieces == {whole.ctypes.data: 5 * PAGE_BYTES}
        device.close()
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("pages", "told"),
    [(8, ""), (1, "did not register 16 KiB of host memory (error 712)")],
    ids=["all of it", "a part"],
)
def test_a_registration_by_the_owner_is_left_alone(
    runtime: FakeCUDA, caplog: pytest.LogCaptureFixture, pages: int, told: str
) -> None:
    runtime.register(ADDRESS, pages * PAGE_BYTES, 0)
    open_device(host(4, PAGE_BYTES)).close()
    assert told in caplog.text
    assert bool(caplog.text) is bool(told)
    assert runtime.pieces == {ADDRESS: pages * PAGE_BYTES}
