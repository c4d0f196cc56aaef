from __future__ import annotations

import mmap
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from kvtier_sdk import ConfigError, HostPool, KVTierError, Region
from kvtier_sdk.engine import EngineMemory, OverlappingSlots

MEMORY_BYTES = 16 * 4096
OBJECT_BYTES = 10_000


def memory_at(address: int) -> EngineMemory:
    return EngineMemory("an engine", Region(address, MEMORY_BYTES))


@pytest.fixture
def shared() -> Iterator[int]:
    segment = SharedMemory(create=True, size=MEMORY_BYTES)
    array = np.frombuffer(segment.buf, np.uint8)
    yield array.ctypes.data
    del array
    segment.close()
    segment.unlink()


def test_a_process_maps_the_same_objects(shared: int) -> None:
    memory = memory_at(shared)
    slots = OverlappingSlots(memory, OBJECT_BYTES)
    assert slots.is_shared
    slot = memory.slot_at(shared + 5 * 4096, OBJECT_BYTES)
    assert slot == 5
    pool = HostPool.attach(slots.fd, slots.layout, prefault=False)
    for at in (slot, slots.slots - 1):
        slots.padded_view(at, 1)[:] = bytes([at + 1]) * OBJECT_BYTES
        assert pool.view(at) == slots.padded_view(at, 1)
    assert len(slots.padded_view(slot, 4096)) == 3 * 4096
    pool.close()
    memory.close()
    assert not slots.is_shared
    for use in (lambda: slots.fd, lambda: slots.padded_view(0, 1)):
        with pytest.raises(KVTierError, match="was released"):
            use()


def test_memory_of_one_process_is_not_shared() -> None:
    with mmap.mmap(-1, MEMORY_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapping:
        array = np.frombuffer(mapping, np.uint8)
        memory = memory_at(array.ctypes.data)
        assert not memory.is_shared
        OverlappingSlots(memory, OBJECT_BYTES).padded_view(1, 1)[:3] = b"abc"
        assert bytes(array[4096:4099]) == b"abc"
        memory.close()
        del array


@pytest.mark.parametrize("offset", [-4096, 100, MEMORY_BYTES - 2 * 4096, MEMORY_BYTES])
def test_an_object_outside_of_the_memory_has_no_slot(shared: int, offset: int) -> None:
    memory = memory_at(shared)
    assert memory.slot_at(shared + offset, OBJECT_BYTES) is None
    memory.close()


def test_an_object_larger_than_the_memory_and_a_slot_beyond_it_are_refused(shared: int) -> None:
    memory = memory_at(shared)
    with pytest.raises(ConfigError, match="does not fit"):
        OverlappingSlots(memory, MEMORY_BYTES + 1)
    slots = OverlappingSlots(memory, OBJECT_BYTES)
    with pytest.raises(IndexError):
        slots.padded_view(slots.slots, 1)
    memory.close()
