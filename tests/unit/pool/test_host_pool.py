from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvtier_sdk import HostPool, KVTierError, Region

CHUNK_BYTES = 1000


@pytest.fixture
def pool() -> Iterator[HostPool]:
    pool = HostPool(4, CHUNK_BYTES)
    yield pool
    pool.close()


def address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def warnings_of(pool: HostPool, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    pool.close()
    return list(caplog.messages)


@pytest.mark.parametrize("alignment", [1, 512, 4096])
def test_a_view_is_contiguous_aligned_writable_bytes(pool: HostPool, alignment: int) -> None:
    for slot in range(pool.slots):
        view = pool.padded_view(slot, alignment)
        assert (view.format, view.itemsize, view.contiguous, view.readonly) == ("B", 1, True, False)
        assert len(view) == -(-CHUNK_BYTES // alignment) * alignment
        assert address_of(view) % 4096 == 0


def test_views_of_a_slot_are_one_memory_and_of_two_slots_are_two(pool: HostPool) -> None:
    for slot in range(pool.slots):
        pool.view(slot)[:] = bytes([slot + 1]) * CHUNK_BYTES
    for slot in range(pool.slots):
        assert pool.view(slot) == bytes([slot + 1]) * CHUNK_BYTES
        assert not any(pool.padded_view(slot, 4096)[CHUNK_BYTES:])


@pytest.mark.parametrize("slot", [-1, 4])
def test_there_is_no_other_slot(pool: HostPool, slot: int) -> None:
    with pytest.raises(IndexError, match=f"slot {slot} of a pool of 4"):
        pool.view(slot)


# Ways to keep a view in use: the view itself, or an object made from it.
KEPT: dict[str, Callable[[memoryview], Any]] = {
    "the view": lambda view: view,
    "a slice": lambda view: view[10:20],
    "a slice of a slice": lambda view: view[10:20][2:3],
    "a cast": lambda view: view.cast("Q"),
    "an array": lambda view: np.frombuffer(view, np.uint8),
    "a slice of an array": lambda view: np.frombuffer(view, np.uint8)[5:6],
    "a view of an array": lambda view: memoryview(np.frombuffer(view, np.uint8))[1:],
    "a read-only view": lambda view: view.toreadonly(),
}


@pytest.mark.parametrize("make", KEPT.values(), ids=list(KEPT))
def test_closing_leaves_the_memory_to_views_and_says_so(
    pool: HostPool, caplog: pytest.LogCaptureFixture, make: Callable[[memoryview], Any]
) -> None:
    pool.view(1)[:] = b"k" * CHUNK_BYTES
    kept = make(pool.view(1))
    mapping = weakref.ref(pool._mapping)
    assert warnings_of(pool, caplog) == [
        "the host pool was closed while views of it are in use; its memory is "
        "released when the last of them is gone"
    ]
    assert bytes(memoryview(kept))[:1] == b"k"
    del kept
    assert mapping() is None, "the last view is gone, and the pool object keeps nothing"
    assert warnings_of(pool, caplog) == [], "it is said once"


def test_closing_frees_unused_memory(pool: HostPool, caplog: pytest.LogCaptureFixture) -> None:
    pool.view(0)
    garbage: list[Any] = [pool.view(0)]
    garbage.append(garbage)
    del garbage
    mapping = weakref.ref(pool._mapping)
    assert warnings_of(pool, caplog) == []
    assert mapping() is None


def test_a_closed_pool_hands_out_nothing(pool: HostPool) -> None:
    pool.view(0)
    pool.close()
    with pytest.raises(KVTierError, match="the host pool is closed"):
        pool.view(0)
    with pytest.raises(KVTierError, match="the host pool is closed"):
        pool.view(0)


def test_every_slot_lies_in_the_pools_region(pool: HostPool) -> None:
    region = pool.region
    assert region.size_bytes == pool.slots * pool.row_bytes
    for slot in range(pool.slots):
        place = Region.of(pool.padded_view(slot, 4096))
        assert region.covers(place)
        assert place.address == region.address + slot * pool.row_bytes
    assert not region.covers(Region(region.address + 1, region.size_bytes))
    assert not region.covers(Region(region.address - 1, 2))
    pool.close()
    with pytest.raises(KVTierError, match="is closed"):
        _ = pool.region
